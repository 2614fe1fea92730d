"""Base of masks that drop some entries and grow as many."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.core import arguments
from laconic.sparsity import schedule
from laconic.sparsity.densities import DensityLayout, check_density
from laconic.sparsity.drop_and_grow import drop_and_grow
from laconic.sparsity.mask_rule import Moment
from laconic.sparsity.sparsify import Sparsifier


@dataclass(frozen=True, repr=False)
class ChangingMasks(Sparsifier):
    """Periodic updates. Arguments: see `Rigl`."""

    density: float = 0.1
    every: int = 100
    drop: float = 0.3
    until: float = 0.75
    layout: DensityLayout = "erk"

    def __post_init__(self) -> None:
        check_density(self.density, self.layout)
        arguments.whole("every", self.every, 1)
        arguments.number("drop", self.drop, above=0, most=1)
        arguments.number("until", self.until, above=0, most=1)

    def due(self, turn: int, steps: int) -> bool:
        return schedule.due(turn, steps, self.every, self.until)

    def changed(self, weight: Tensor, used: Tensor, score: Tensor, at: Moment) -> Tensor:
        count = int(schedule.fraction(at.turn, at.steps, self.drop, self.until) * int(used.sum()))
        return drop_and_grow(weight.abs(), used, score, count, at.key, self.layout)
