"""Decentralised parallel SGD: every rank trains, and averages with its neighbours, both ways at once.

    x_i <- LocalOpt(x_i, g_i)
    x_i <- W_ii x_i + sum_j W_ij x_j          over the neighbours j of this step

Lian et al. 2017, arXiv:1705.09056; the update before the mixing, as in the code of Assran et al. 2019. W is
symmetric and doubly stochastic, by Metropolis weights on any graph: no weight travels, and the mean is kept.
On a regular graph the weights are those of SGP, and so is the trajectory, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.messages import check_wire
from laconic.strategies.gossip.mixing import is_regular, metropolis, uniform
from laconic.strategies.gossip.synchronous import Gossip
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.gossip.topology import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Strategy


@dataclass(frozen=True, repr=False)
class DPSGD(Strategy):
    """Average with the neighbours in `topology`, whose edges go both ways, at every step.

    Wire, to each neighbour a step: n parameters as `wire` says, 4 or 2 bytes each; of 2 bytes, 8 of weight.
    """

    topology: Topology = field(default_factory=Ring)
    wire: str = "fp32"

    name: ClassVar[str] = "dpsgd"
    paper: ClassVar[str] = "Lian et al. 2017, arXiv:1705.09056"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = ("dpsgd(topology=bipartite_exponential())",)

    def __post_init__(self) -> None:
        arguments.piece("dpsgd: topology", self.topology, Topology, "ring()")
        check_wire(self.wire)
        if not self.topology.symmetric:
            raise SpecError(
                f"dpsgd averages both ways, and not all edges of {self.topology!r} do: take ring(), torus(),"
                " bipartite_exponential() or random_matching(), or sgp(), which needs no edge back"
            )

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        self.topology.check(size)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> Gossip:
        mixing = uniform if is_regular(self.topology, comm.size) else metropolis  # equal, but for rounding
        return Gossip(self.topology, mixing, replica, comm, weighted=False, wire=self.wire)
