"""Strategy of one remaining rank."""

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
    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundAlone:
        return BoundAlone(replica, comm)


class BoundAlone(BoundStrategy):
    def step_(self, update: Update, loss: float | None) -> None:
        update()


def or_alone(strategy: Strategy, size: int, optimizers: Iterable[Optimizer], fall_back: bool) -> Strategy:
    """Return `strategy`, or `Alone` for one rank; with `fall_back` also if it does not support `size`."""
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
