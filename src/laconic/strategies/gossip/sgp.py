"""Stochastic gradient push: every rank trains, and averages with a few others at each step.

    z_i = x_i / w_i;  g_i = gradient at z_i
    x_i <- LocalOpt(x_i, g_i)
    x_i <- P_ii x_i + sum_j P_ij x_j,  w_i <- P_ii w_i + sum_j P_ij w_j     over the in-peers j of this step

Assran et al. 2019, arXiv:1811.10792; update order as in the authors' code. P is column-stochastic: the shares
that a rank keeps and sends sum to 1. If it is doubly stochastic, w stays 1 and is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing import is_regular, uniform
from laconic.strategies.gossip.mixing.debias import check_debiased
from laconic.strategies.gossip.mixing.gossip_strategy import GossipStrategy
from laconic.strategies.gossip.mixing.messages import check_wire
from laconic.strategies.gossip.mixing.synchronous import Gossip
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.exponential import Exponential
from laconic.strategies.replica import Replica


@dataclass(frozen=True, repr=False)
class SGP(GossipStrategy):
    """Push of equal shares to the out-peers at every step.

    Wire, per out-peer and step: n parameters of 4 or 2 bytes, and 8 bytes of weight if it may vary. The
    sender keeps its rounding error, so the sum over ranks is kept.

    Args:
        topology: Directed edges; default: exponential().
        wire: Type of the sent parameters: "fp32" (default), "fp16" or "bf16".

    Raises:
        SpecError: An argument is outside its range.
    """

    topology: Topology = field(default_factory=Exponential)
    wire: str = "fp32"

    name: ClassVar[str] = "sgp"
    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"
    examples: ClassVar[tuple[str, ...]] = ("sgp()", "sgp(topology=exponential(peers=2), wire='fp16')")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire(self.wire)

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if not is_regular(self.topology, size):
            check_debiased(self, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> Gossip:
        weighted = not is_regular(self.topology, comm.size)
        return Gossip(self.topology, uniform, replica, comm, weighted=weighted, wire=self.wire)
