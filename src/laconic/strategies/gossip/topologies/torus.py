"""Torus: ranks on a grid that wraps around, each with its four neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Undirected


@dataclass(frozen=True, repr=False)
class Torus(Undirected):
    """Rank r = row * columns + column and the ranks above, below, left and right exchange, at every step.

    Args:
        rows: Rows of the grid, a divisor of size; default: 0, the grid nearest to a square. A prime size is a
            ring.

    >>> Torus().peers(rank=0, size=12, step=0).out  # 3 rows of 4
    (1, 3, 4, 8)
    """

    status: ClassVar[Status] = "own"

    rows: int = 0

    examples: ClassVar[tuple[str, ...]] = ("torus()", "torus(rows=2)")

    def __post_init__(self) -> None:
        arguments.whole("torus: rows", self.rows, hint="0 makes the grid nearest to a square")

    def check_fits(self, size: int) -> None:
        if self.rows and size % self.rows:
            raise SpecError(
                f"torus: rows must divide the number of ranks, got rows={self.rows} for {size} ranks;"
                f" use rows={nearest_square(size)}, or omit rows"
            )

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        rows = self.rows or nearest_square(size)
        columns = size // rows
        for rank in range(size):
            row, column = divmod(rank, columns)
            yield rank, row * columns + (column + 1) % columns
            yield rank, (row + 1) % rows * columns + column


def nearest_square(size: int) -> int:
    """Return the largest divisor of size up to its square root.

    >>> [nearest_square(size) for size in (16, 12, 7)]
    [4, 3, 1]
    """
    return next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)
