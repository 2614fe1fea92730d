"""Base of gossip strategies."""

from __future__ import annotations

from torch.optim import Optimizer

from laconic.core import arguments
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.strategy import Strategy


class GossipStrategy(Strategy):
    topology: Topology

    def __post_init__(self) -> None:
        arguments.piece(f"{self.name}: topology", self.topology, Topology, "ring()")

    @property
    def keeps_mean(self) -> bool:
        return True

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        self.topology.check(size)
