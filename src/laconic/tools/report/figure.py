"""Figure of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MB = 1e6


@dataclass(frozen=True)
class Figure:
    """Mean over seeds with its standard error, which is nan for one seed."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure:
        found = np.array([value for value in values if not math.isnan(value)])
        if not len(found):
            return cls(math.nan, math.nan)
        spread = len(found) > 1 and bool(np.isfinite(found).all())
        error = float(found.std(ddof=1) / math.sqrt(len(found))) if spread else math.nan
        return cls(float(found.mean()), error)

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Format as `mean ± error`.

        >>> Figure(0.98125, 0.002).text(100), Figure(0.5, math.nan).text(), Figure(math.nan, math.nan).text()
        ('98.12 ± 0.20', '0.50', '-')
        """
        if math.isnan(self.mean):
            return "-"
        error = "" if math.isnan(self.error) else f" ± {self.error * scale:.{digits}f}"
        return f"{self.mean * scale:.{digits}f}{error}"


UNKNOWN = Figure(math.nan, math.nan)
