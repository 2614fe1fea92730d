"""Growth of a figure with the number of workers N, fitted to small groups.

    all_gather of m bytes per rank   (N - 1) m           the first form below
    all_reduce of m bytes            2 (N - 1) / N m     the second: nearly constant
    a tree                           log2 N m            the third
    local work of a rank             m                   the fourth

Of the sums of these, with non-negative factors, that fit, the one with the fewest terms is used, as small
errors would grow with N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log2

import numpy as np

CLOSE = 0.05


def _forms(size: int) -> tuple[float, ...]:
    return (size - 1, (size - 1) / size, log2(size), 1.0)


@dataclass(frozen=True)
class Growth:
    """A figure for any N: the sum of `parts[i]` times form i.

    >>> gathered = Growth.fit({2: 4.0, 3: 8.0, 4: 12.0})  # an all_gather
    >>> round(gathered.at(64))
    252
    """

    parts: tuple[float, float, float, float]

    @classmethod
    def fit(cls, measured: Mapping[int, float], close: float = CLOSE) -> Growth:
        """Return the simplest growth within `close` of all values, else the closest."""
        sizes = sorted(measured)
        values = np.array([measured[size] for size in sizes], dtype=np.float64)
        forms = np.array([_forms(size) for size in sizes])
        most = float(np.abs(values).max(initial=0.0))
        best, nearest = np.zeros(forms.shape[1]), most
        for number in range(1, min(len(sizes), forms.shape[1]) + 1):
            for chosen in combinations(range(forms.shape[1]), number):
                part, *_ = np.linalg.lstsq(forms[:, chosen], values, rcond=None)
                miss = float(np.abs(forms[:, chosen] @ part - values).max())
                if (part >= 0).all() and miss < nearest * (1 - 1e-9):
                    best, nearest = np.zeros(forms.shape[1]), miss
                    best[list(chosen)] = part
            if nearest <= close * most:
                break
        first, second, third, fourth = map(float, best)
        return cls((first, second, third, fourth))

    def at(self, size: int) -> float:
        return sum(part * form for part, form in zip(self.parts, _forms(size), strict=True))

    @property
    def grows(self) -> bool:
        return self.parts[0] * _forms(64)[0] > 0.5 * self.at(64)

    def __str__(self) -> str:
        """Format the terms that matter for 4 to 64 workers.

        >>> print(Growth((4.06, 0, 0, 0)), "or", Growth((0, 64, 0.5, 0)))
        4.06 (N-1) or 64 (N-1)/N + 0.5 log2 N
        """
        names = ("(N-1)", "(N-1)/N", "log2 N", "")
        terms = [
            f"{part:.3g} {name}".rstrip()
            for i, (part, name) in enumerate(zip(self.parts, names, strict=True))
            if any(part * _forms(size)[i] > 0.01 * self.at(size) for size in (4, 64))
        ]
        return " + ".join(terms) or "0"

    def __mul__(self, factor: float) -> Growth:
        first, second, third, fourth = self.parts
        return Growth((first * factor, second * factor, third * factor, fourth * factor))
