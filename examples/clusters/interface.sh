#!/bin/bash
# Run a command with the network interface for gloo and NCCL set:
#
#     interface.sh "node1 node2" torchrun ...
#
# The interface is the one through which this machine reaches one of the hosts. It reaches itself through lo, so
# a host with any other interface is preferred. Variables that are already set stay.
found=
for host in $1; do
    address=$(getent ahosts "$host" | awk '{ print $1; exit }')
    device=$(ip -o route get "$address" 2> /dev/null | sed -E 's/.* dev ([^ ]+).*/\1/')
    found=${device:-$found}
    if [ "${found:-lo}" != lo ]; then break; fi
done
shift
if [ -n "$found" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$found}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$found}
fi
echo "$(hostname): interface ${GLOO_SOCKET_IFNAME:-chosen by gloo}"
exec "$@"
