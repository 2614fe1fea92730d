"""Gossiping: replicas in sync average parameters with neighbours."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.spec import parse
from laconic.exchange.agreement import Fingerprint
from laconic.replicator.deployment import RankContext
from laconic.strategies.distribute import bind
from laconic.strategies.gossip.choco import CHOCO
from laconic.strategies.gossip.sgp import SGP
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.membership import Membership
from laconic.strategies.parameter_controller import ParameterController
from laconic.strategies.strategy import Strategy


class FixedMembership(Membership):
    def __init__(self, seat: RankContext) -> None:
        self.comm, side = Metered(seat.comm), seat.comm.split(0)
        self.start_comm = self.side_comm = side
        self.heartbeats = self.joint_calls = None

    def started(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def gossiping(
    seat: RankContext, optimizer: Optimizer, topology: Any, compressor: Any, name: str, seed: int
) -> ParameterController:
    """Bind `sgp`, or with a compressor `choco`, to this replica; all in sync call it."""
    strategy, membership = strategy_of(topology, compressor), FixedMembership(seat)

    def describe() -> Fingerprint:
        return {"the optimiser's name": name}

    return bind(nn.Module(), [optimizer], strategy, membership, describe, seed=seed, statistics="keep")


def strategy_of(topology: Any, compressor: Any) -> Strategy:
    """Return the gossip strategy for this topology.

    >>> strategy_of("ring()", None), strategy_of("ring()", "sign()")
    (sgp(ring()), choco(sign()))
    """
    edges = parse(topology) if isinstance(topology, str) else topology
    arguments.piece("topology", edges, Topology, "ring()")
    if compressor is None:
        return SGP(topology=edges)
    return CHOCO(parse(compressor) if isinstance(compressor, str) else compressor, topology=edges)
