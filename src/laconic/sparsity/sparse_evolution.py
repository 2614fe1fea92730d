"""Sparse evolution (SET): the smallest weights drop, and random ones grow.

Mocanu et al. 2018, doi:10.1038/s41467-018-04316-3, in the form of the baseline of the RigL authors
(google-research/rigl): smallest |w| of the whole weight (SET: smallest positive and largest negative ones), a
fraction that falls as a cosine, updates after the optimiser's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core.spec import Status
from laconic.sparsity import schedule
from laconic.sparsity.densities import DensityLayout, check_density
from laconic.sparsity.draws import generator
from laconic.sparsity.drop_and_grow import drop_and_grow
from laconic.sparsity.mask_rule import Moment
from laconic.sparsity.sparsify import Sparsifier


@dataclass(frozen=True, repr=False)
class SparseEvolution(Sparsifier):
    """Drop by magnitude, grow at random. Arguments as for `rigl`.

    >>> SparseEvolution(density=0.2)
    sparse_evolution(density=0.2)
    """

    density: float = 0.1
    every: int = 100
    drop: float = 0.3
    until: float = 0.75
    layout: DensityLayout = "erk"

    paper: ClassVar[str] = "Mocanu et al. 2018, doi:10.1038/s41467-018-04316-3"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "google-research/rigl"
    examples: ClassVar[tuple[str, ...]] = ("sparse_evolution(density=0.1)",)

    def __post_init__(self) -> None:
        check_density(self.density, self.layout)
        schedule.check(self.every, self.drop, self.until)

    def due(self, turn: int, steps: int) -> bool:
        return schedule.due(turn, steps, self.every, self.until)

    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        count = int(schedule.fraction(at.turn, at.steps, self.drop, self.until) * int(used.sum()))
        luck = torch.rand(
            used.numel(), generator=generator(at.key + 2), dtype=torch.float32, device="cpu"
        ).to(used.device)
        return drop_and_grow(weight.abs(), used, luck, count, at.key, self.layout)
