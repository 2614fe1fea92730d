"""Straight-through training towards a table of few bits (Bengio et al. 2013, arXiv:1308.3432).

The model computes with the nearest weights that a table and its scales can hold; the gradient there moves the
float32 weights behind them. `laconic.lowbit.straight_through` explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.lowbit.admm import StraightThrough, straight_through
from laconic.lowbit.admm.tables import Name, table_of
from laconic.lowbit.admm.weights import Tie
from laconic.lowbit.training import LowBitTraining


@dataclass(frozen=True, repr=False)
class StraightThroughTraining(LowBitTraining):
    """The arguments of `laconic.lowbit.straight_through`: a table, and what shares a scale."""

    name: ClassVar[str] = "straight_through"
    paper: ClassVar[str] = "Bengio et al. 2013, arXiv:1308.3432"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("straight_through()", "straight_through(table='binary')")

    table: Name = "ternary"
    tie: Tie = "row"
    rounds: int = 5
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments.names("keep", self.keep, "head")
        table_of(self.table)
        arguments.choice("tie", self.tie, ("model", "layer", "row"))
        arguments.whole("rounds", self.rounds, 1)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> StraightThrough:
        return straight_through(model, optimizer, self.table, self.tie, rounds=self.rounds, keep=self.keep)
