"""The contenders of `benchmarks.steps`: our methods by spec, and others by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

import laconic
from benchmarks.steps import peers
from benchmarks.steps.peers import ONE_BUCKET_MB
from benchmarks.steps.running import Running, ddp, sgd

ALONE, DENSE = "no communication", "DDP, dense"
NOTHING = "DDP, a hook that does nothing"
RING, HIVE = "decent-dp, ring", "hivemind, 8 bits"
POWERSGD = "PowerSGD hook, rank 1"
DGC, AUTO = "dgc(density=0.001)", "auto(lossiest=sampled_topk(density=0.001))"  # all candidates
WHOLE = ", one bucket"  # at the end of a spec: DDP hands over all gradients at once, which saves messages
OURS = (
    DGC,
    DGC + WHOLE,
    "deft(density=0.001)",
    "terngrad()",
    "qsgd(levels=7)",
    "cgx(bits=4)",
    AUTO,
)
GOALS = {DGC: 0.95, "deft(density=0.001)": 0.9, "powersgd(rank=2)": 0.9}  # of NOTHING's seconds over theirs
SETTLE: Mapping[str, int] = {AUTO: 150}  # steps over a link before it is timed, where one is too few
FETCHED = (RING, HIVE)  # from PyPI, see installed.py
PEERS: Mapping[str, Callable[[nn.Module], Running]] = {
    ALONE: peers.alone,
    NOTHING: peers.nothing,
    DENSE: peers.dense,
    "fp16 hook": peers.fp16,
    POWERSGD: partial(peers.powersgd, rank=1),
    "PowerSGD hook, rank 4": partial(peers.powersgd, rank=4),
    "plain torch DGC": peers.dgc,
    "plain torch TernGrad": peers.terngrad,
    "plain torch QSGD": peers.qsgd,
    RING: peers.ring,
    HIVE: peers.uniform8,
}


def build(name: str, model: nn.Module) -> Running:
    """A contender at work on this model. Called by all ranks."""
    if name in PEERS:
        return PEERS[name](model)
    made = ddp(model, ONE_BUCKET_MB if name.endswith(WHOLE) else None)
    optimizer = sgd(made)
    return Running(made, optimizer, handle=laconic.compress(made, optimizer, name.removesuffix(WHOLE)))
