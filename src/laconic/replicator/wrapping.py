"""Wrapping: which controller an optimiser gets in a deployment."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch.optim import Optimizer

from laconic.core.errors import AttachError, SpecError
from laconic.optim.closure import refuse_lbfgs
from laconic.optim.unwrapping import refuse_wrapper, require_single_weights
from laconic.replicator.averaging import as_method, averaging
from laconic.replicator.deployment import Seat
from laconic.replicator.gossiping import gossiping, strategy_of
from laconic.replicator.optimizer import ReplicatedOptimizer
from laconic.replicator.parameters import named
from laconic.replicator.plain import Plain
from laconic.replicator.servers.pushing import Pushing
from laconic.strategies.controller import Controller

DENSE = "dense()"


def check_free(optimizer: Optimizer, name: str, taken: Collection[str]) -> None:
    """Raise `SpecError` for what is no name, and `AttachError` for a name or an optimiser that is taken."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise SpecError(f"name must be a word of letters, digits, '_', '-' and '.', got {name!r}")
    if name in taken:
        raise AttachError(
            f"two optimisers are named {name!r}: give each its own, such as"
            ' wrap_optimizer(optimizer, name="generator")'
        )
    if isinstance(optimizer, ReplicatedOptimizer):
        raise AttachError(f"this optimiser is wrapped already, as {optimizer.name!r}")


def controller_of(
    seat: Seat, optimizer: Optimizer, compressor: Any, topology: Any, name: str, seed: int, number: int
) -> Controller:
    """It reads both specs wherever the script runs, so that a wrong one shows on one device already."""
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
                f"topology={topology!r} says which replicas average with which, and in 'async' and 'groups'"
                " none do: leave it out, or take 'sync' or 'local'"
            )
        return Pushing(seat, optimizer, DENSE if compressor is None else compressor, name, seed, number)
    if topology is not None and seat.comm.size > 1:
        return gossiping(seat, optimizer, topology, compressor, name, seed)
    return averaging(seat, optimizer, DENSE if compressor is None else compressor, name, seed)
