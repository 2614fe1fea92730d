"""Alone: the strategy of the last rank when all others are lost."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from laconic.comm.metered import Metered
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
