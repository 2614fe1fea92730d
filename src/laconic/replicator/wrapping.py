"""Selection of the controller of an optimiser in a deployment."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch.optim import Optimizer

from laconic.core.errors import AttachError, SpecError
from laconic.optim.closure import refuse_lbfgs
from laconic.optim.unwrapping import refuse_wrapper, require_single_weights
from laconic.replicator.averaging import as_method, averaging
from laconic.replicator.deployment import RankContext
from laconic.replicator.gossiping import gossiping, strategy_of
from laconic.replicator.optimizer import ReplicatedOptimizer
from laconic.replicator.parameters import named
from laconic.replicator.plain import Plain
from laconic.replicator.servers.server_client import ServerClient
from laconic.strategies.controller import Controller

DENSE = "dense()"


def check_name(optimizer: Optimizer, name: str, taken: Collection[str]) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise SpecError(f"name must be a word of letters, digits, '_', '-' and '.', got {name!r}")
    if name in taken:
        raise AttachError(
            f"two optimisers are named {name!r}: use different names, such as"
            ' wrap_optimizer(optimizer, name="generator")'
        )
    if isinstance(optimizer, ReplicatedOptimizer):
        raise AttachError(f"this optimiser is wrapped already, as {optimizer.name!r}")


def make_controller(
    seat: RankContext, optimizer: Optimizer, compressor: Any, topology: Any, name: str, seed: int, number: int
) -> Controller:
    """Return the controller. Checks both specs in every deployment: errors show on one device."""
    refuse_lbfgs(optimizer, "an exchange of gradients")
    if topology is not None:
        require_single_weights(optimizer, f"topology={topology!r}")
        strategy_of(topology, compressor)
    else:
        as_method(DENSE if compressor is None else compressor)
    if seat.alone:
        named(optimizer)
        return Plain(optimizer)
    if seat.served:
        refuse_wrapper(optimizer, "a server, which steps in its place,")
        if topology is not None:
            raise SpecError(
                f"topology={topology!r} needs replicas that average parameters, but in 'async' and 'groups'"
                " they do not: omit it, or use 'sync' or 'local'"
            )
        return ServerClient(seat, optimizer, DENSE if compressor is None else compressor, name, seed, number)
    if topology is not None and seat.comm.size > 1:
        return gossiping(seat, optimizer, topology, compressor, name, seed)
    return averaging(seat, optimizer, DENSE if compressor is None else compressor, name, seed)
