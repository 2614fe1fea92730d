"""Test whether Adam's variance has settled, so that it can be frozen.

Tang et al. 2021, arXiv:2102.02888 (1-bit Adam) [recalled]: the warm-up ends once the learning rate no longer
rises and, with Delta = 1 / (1 - b2),

    |v_t|_1 / |v_(t - Delta)|_1 >= 0.96

Three changes are ours: v has its bias corrected, as the norm of a young v always rises; a norm that has risen
by more than 1 / 0.96 has not settled, as a v frozen too low makes steps too long; and v is checked `CHECKS`
times in Delta steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RATIO, CHECKS = 0.96, 16


class SettledVariance:
    """Norms of v at the last `CHECKS` + 1 checks, or fewer if Delta has fewer steps.

    >>> watch = SettledVariance()
    >>> norms = [1.0, 0.95, 0.93, 0.92, 0.92, 0.92]
    >>> [watch.add(norm, rate=0.1, span=2) for norm in norms]
    [False, False, False, True, True, True]
    """

    def __init__(self, state: Sequence[float] = (0.0, math.inf)) -> None:
        self._checked, self._rate, *self._norms = state  # at the last check

    @property
    def state(self) -> list[float]:
        return [self._checked, self._rate, *self._norms]

    def is_due(self, steps: float, every: int) -> bool:
        due = steps > self._checked and steps % every == 0
        if due:
            self._checked = steps
        return due

    def add(self, norm: float, rate: float, span: int) -> bool:
        """Add the norm of v, bias corrected; return whether v has settled. `span`: checks in Delta."""
        rises, self._rate = rate > self._rate, rate
        self._norms = [*self._norms[-span:], norm]
        if len(self._norms) <= span or rises:
            return False
        low, high = sorted((self._norms[0], norm))
        return low > 0 and low >= RATIO * high
