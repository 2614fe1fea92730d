"""Gradual pruning: a dense model becomes sparse by magnitude.

Zhu and Gupta 2017, arXiv:1710.01878 [recalled]. From `begin` to `until`, every `every` turns, after the
optimiser's step, each layer keeps its largest |w| at

    density = share + (1 - share) * (1 - progress)^3

Pruned weights stay zero; in the paper they keep their value under the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.sparsity import fours, schedule
from laconic.sparsity.densities import DensityLayout, check_density, entries
from laconic.sparsity.drop_and_grow import largest
from laconic.sparsity.mask_rule import Moment
from laconic.sparsity.sparsify import Sparsifier


@dataclass(frozen=True, repr=False)
class GradualPruning(Sparsifier):
    """Gradual pruning by magnitude.

    Args:
        density: Final fraction of weights in use, in (0, 1].
        every: Turns between updates.
        begin: Fraction of the training before pruning, in [0, until).
        until: Fraction of the training after which masks are fixed, in (0, 1].
        layout: As for `rigl`.

    >>> GradualPruning(density=0.2)
    gradual_pruning(density=0.2)
    """

    density: float = 0.1
    every: int = 100
    begin: float = 0.25
    until: float = 0.75
    layout: DensityLayout = "erk"

    paper: ClassVar[str] = "Zhu and Gupta 2017, arXiv:1710.01878"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("gradual_pruning(density=0.1)",)

    def __post_init__(self) -> None:
        check_density(self.density, self.layout)
        arguments.whole("every", self.every, 1)
        arguments.number("until", self.until, above=0, most=1)
        arguments.number("begin", self.begin, least=0, below=self.until)

    def first_density(self, share: float) -> float:
        return 1.0

    def due(self, turn: int, steps: int) -> bool:
        last = int(self.until * steps)
        return turn == last or (
            turn >= self.begin * steps and schedule.due(turn, steps, self.every, self.until)
        )

    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        first, last = self.begin * at.steps, int(self.until * at.steps)
        progress = 1.0 if at.turn >= last else max(0.0, (at.turn - first) / (last - first))
        density = share + (1 - share) * (1 - progress) ** 3
        count = min(int(used.sum()), entries(density, used.numel()))
        magnitude = weight.abs().masked_fill(~used, -1)
        if self.layout == "2:4":
            magnitude.masked_fill_(fours.complete_fours(torch.zeros_like(used), magnitude, at.key), torch.inf)
        return largest(magnitude, count, at.key)
