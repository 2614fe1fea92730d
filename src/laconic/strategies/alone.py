"""Alone: the strategy of one rank after all others were lost or have finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, SpecError
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Strategy, Update


@dataclass(frozen=True, repr=False)
class Alone(Strategy):
    """Plain local training on one rank."""

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundAlone:
        return BoundAlone(replica, comm)


class BoundAlone(BoundStrategy):
    """Local steps, without communication."""

    def step_(self, update: Update, loss: float | None) -> None:
        update()


def or_alone(strategy: Strategy, size: int, optimizers: Iterable[Optimizer], fall_back: bool) -> Strategy:
    """Return the strategy of a new group of this size: `Alone` for one rank.

    Args:
        fall_back: Whether ranks also train alone if the strategy does not support their number.

    Raises:
        AttachError, SpecError: The strategy does not support this number of ranks or these optimisers.
    """
    if size == 1:
        return Alone()
    try:
        for each in optimizers:
            strategy.check_left(size, each)
    except (AttachError, SpecError):
        if fall_back:
            return Alone()
        raise
    return strategy
