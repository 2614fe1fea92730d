"""Static masks: random masks, fixed throughout training. A baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core.spec import Status
from laconic.sparsity.densities import DensityLayout, check_density
from laconic.sparsity.mask_rule import Moment
from laconic.sparsity.sparsify import Sparsifier


@dataclass(frozen=True, repr=False)
class StaticMasks(Sparsifier):
    """Fixed random masks.

    Args:
        density: Fraction of weights in use, in (0, 1].
        layout: As for `rigl`.

    >>> StaticMasks(density=0.2)
    static_masks(density=0.2)
    """

    status: ClassVar[Status] = "own"

    density: float = 0.1
    layout: DensityLayout = "erk"

    examples: ClassVar[tuple[str, ...]] = ("static_masks(density=0.1)",)

    def __post_init__(self) -> None:
        check_density(self.density, self.layout)

    def due(self, turn: int, steps: int) -> bool:
        return False

    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        return used
