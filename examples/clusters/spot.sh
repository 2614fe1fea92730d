#!/bin/bash
# Start or rejoin a training on a spot instance. A machine that stays up runs store.py:
#
#     python examples/clusters/store.py            # at 10.0.0.1
#     examples/clusters/spot.sh 10.0.0.1           # on each instance, also on later ones
#
# The machine with store.py runs no ranks. store.py serves a name once: for a new training set RUN to another.
# Each loss of an instance costs every other torchrun one of its restarts; an instance that joins costs none.
store=$1
shift
# A new store for each restart: in torchrun's shared one ranks may find the addresses of earlier ranks, and hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec bash examples/clusters/interface.sh "$store" \
    torchrun --nnodes "${NODES:-1:8}" --nproc-per-node "${RANKS_PER_NODE:-1}" --max-restarts 1000 \
    --rdzv-backend c10d --rdzv-endpoint "$store:${PORT:-29400}" --rdzv-id "${RUN:-spot}" \
    --rdzv-conf "is_host=0,last_call_timeout=${LAST_CALL_S:-30}" \
    examples/clusters/train.py --folder "${FOLDER:-runs/clusters}" "$@"
