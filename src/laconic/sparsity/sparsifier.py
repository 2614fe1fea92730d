"""Sparsifier: which weights are in use at the start, and how that changes in training."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core.spec import Spec
from laconic.sparsity import fours
from laconic.sparsity.densities import Layout, entries
from laconic.sparsity.draws import drawn


@dataclass(frozen=True)
class Moment:
    """When a mask changes. `turn`: steps so far; `steps`: in all; `key`: of one weight, on all ranks."""

    turn: int
    steps: int
    key: int


class Sparsifier(Spec):
    """What `laconic.sparsity.sparsify` takes: a frozen dataclass.

    `replaces_step`: an update of the masks stands in the place of the optimiser's step; otherwise it follows.
    """

    density: float
    layout: Layout

    replaces_step: ClassVar[bool] = False

    def first_density(self, share: float) -> float:
        """The density at the start of a weight that has `share` at the end."""
        return share

    def first_mask(self, n: int, share: float, key: int) -> Tensor:
        """The mask of the start of a weight that has `share` at the end, bool (n,), on the host."""
        share = self.first_density(share)
        if self.layout == "2:4" and share < 1:
            return fours.drawn(n, key)
        return drawn(n, entries(share, n), key)

    @abstractmethod
    def due(self, turn: int, steps: int) -> bool:
        """Whether this turn updates the masks."""

    def counts(self, turn: int, steps: int) -> bool:
        """Whether the dense gradient of this turn is part of the next update's score."""
        return False

    @abstractmethod
    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        """The next mask of one weight.

        Args:
            weight: float (n,), zero where not in use.
            used: Its mask, bool (n,).
            score: Sum over ranks and turns of its dense gradient, (n,), finite; None where none counts.
            share: Density of this weight at the end.
            at: The turn, and the key of all that is random.

        Returns:
            bool (n,).
        """
