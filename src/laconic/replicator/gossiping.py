"""Gossiping: replicas in sync exchange parameters with a few others, along a topology."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.exchange.agreement import agree
from laconic.exchange.state import model_digest
from laconic.replicator.deployment import Seat
from laconic.strategies.gossip.choco import CHOCO
from laconic.strategies.gossip.sgp import SGP
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.membership import Membership
from laconic.strategies.parameter_controller import ParameterController
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Strategy


class Together(Membership):
    """The replicas of a group, which none of them leaves."""

    def __init__(self, seat: Seat) -> None:  # not Membership's: the groups are the deployment's
        self.comm, self.side_comm = Metered(seat.comm), seat.comm.split(0)
        self.heartbeats = self.joint_calls = None

    def close(self) -> None:
        """The deployment closes its groups."""


def gossiping(
    seat: Seat, optimizer: Optimizer, topology: Any, compressor: Any, name: str, seed: int
) -> ParameterController:
    """Bind it on this replica, from the first replica's parameters. Called by all replicas in sync.

    Stochastic gradient push (`sgp`); with a compressor CHOCO-SGD (`choco`), whose graph stays the same.
    Raises `AttachError` or `SpecError` on all replicas if one of them cannot.
    """
    together = Together(seat)
    error: Exception | None = None
    told: dict[str, str] = {}
    try:
        strategy = strategy_of(topology, compressor)
        replica = Replica(nn.Module(), optimizer)
        strategy.check(seat.comm.size, optimizer)
        told = {"the optimiser's name": name, "the spec": repr(strategy), "the seed": str(seed)}
        told["the model"] = model_digest(replica.layout)
    except (AttachError, SpecError) as refused:
        error = refused
    agree(together.side_comm, told, error)
    replica.flatten()
    replica.adopt(together.side_comm)
    return ParameterController(strategy, replica, optimizer, together, seed=seed, statistics="keep")


def strategy_of(topology: Any, compressor: Any) -> Strategy:
    """The strategy that gossips along this topology.

    >>> strategy_of("ring()", None), strategy_of("ring()", "sign()")
    (sgp(ring()), choco(sign()))
    """
    edges = parse(topology) if isinstance(topology, str) else topology
    arguments.piece("topology", edges, Topology, "ring()")
    if compressor is None:
        return SGP(topology=edges)
    return CHOCO(parse(compressor) if isinstance(compressor, str) else compressor, topology=edges)
