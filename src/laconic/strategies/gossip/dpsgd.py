"""Decentralised parallel SGD: every rank trains, and averages with its neighbours in both directions.

    x_i <- LocalOpt(x_i, g_i)
    x_i <- W_ii x_i + sum_j W_ij x_j          over the neighbours j of this step

Lian et al. 2017, arXiv:1705.09056; in the order of the code of Assran et al. 2019. Metropolis weights make W
symmetric and doubly stochastic on any graph: no weight is needed (16-bit messages have one), and the
mean is kept. On a regular graph the trajectory is that of SGP, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing import is_regular, metropolis, uniform
from laconic.strategies.gossip.mixing.gossip_strategy import GossipStrategy
from laconic.strategies.gossip.mixing.messages import check_wire
from laconic.strategies.gossip.mixing.synchronous import Gossip
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.replica import Replica


@dataclass(frozen=True, repr=False)
class DPSGD(GossipStrategy):
    """Average with the neighbours at every step.

    Wire, per neighbour and step: n parameters of 4 bytes; or of 2 bytes, and 8 bytes of weight.

    Args:
        topology: A symmetric graph; default: ring().
        wire: Type of the sent parameters: "fp32" (default), "fp16" or "bf16".

    Raises:
        SpecError: An argument is invalid, or an edge is directed.
    """

    topology: Topology = field(default_factory=Ring)
    wire: str = "fp32"

    name: ClassVar[str] = "dpsgd"
    paper: ClassVar[str] = "Lian et al. 2017, arXiv:1705.09056"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"
    examples: ClassVar[tuple[str, ...]] = ("dpsgd()", "dpsgd(topology=bipartite_exponential())")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire(self.wire)
        if not self.topology.symmetric:
            raise SpecError(
                f"dpsgd averages both ways, but not all edges of {self.topology!r} go both ways: use ring(),"
                " torus(), bipartite_exponential() or random_matching(), or sgp(), which needs no edge back"
            )

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> Gossip:
        mixing = uniform if is_regular(self.topology, comm.size) else metropolis  # equal up to rounding
        return Gossip(self.topology, mixing, replica, comm, weighted=False, wire=self.wire)
