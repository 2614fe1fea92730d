"""Base of mask rules."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core.spec import Spec
from laconic.sparsity import fours
from laconic.sparsity.densities import DensityLayout, entries
from laconic.sparsity.draws import random_mask


@dataclass(frozen=True)
class Moment:
    """`turn`: steps so far; `steps`: total; `key`: of one weight, equal on all ranks."""

    turn: int
    steps: int
    key: int


class MaskRule(Spec):
    """Base of the sparsifiers. `replaces_step`: updates replace the optimiser's step."""

    density: float
    layout: DensityLayout

    replaces_step: ClassVar[bool] = False

    def first_density(self, share: float) -> float:
        """Return the initial density for the final density `share`."""
        return share

    def first_mask(self, n: int, share: float, key: int) -> Tensor:
        """Return a first mask, bool (n,), on the host."""
        share = self.first_density(share)
        if self.layout == "2:4" and share < 1:
            return fours.random_mask(n, key)
        return random_mask(n, entries(share, n), key)

    @abstractmethod
    def due(self, turn: int, steps: int) -> bool:
        """Return whether this turn updates the masks."""

    def counts(self, turn: int, steps: int) -> bool:
        """Return whether this turn's gradient counts in the score."""
        return False

    @abstractmethod
    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        """Return the next mask of one weight, bool (n,).

        Args:
            weight: float (n,), zero where not in use.
            used: Its mask, bool (n,).
            score: Sum of its dense gradients, (n,), finite; None if none counts.
            share: Final density.
            at: The turn and key.
        """
