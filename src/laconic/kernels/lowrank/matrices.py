"""Positions of matrices and their factors in flat buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.layout import Segments

MOST = 1024
NARROW = 4  # most columns with Triton kernels


@dataclass(frozen=True)
class Matrices:
    """Matrices M of `rows` x `cols`, row-major from `starts` of a flat buffer, with factors of `rank`.

    Two buffers have the left factors P, each as `rank` columns of `rows` elements, and the right factors Q,
    of `cols` elements.

    >>> two = Matrices((0, 12), (3, 2), (4, 5), rank=2)
    >>> two.left, two.right
    (10, 18)
    """

    starts: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        arguments.whole("rank", self.rank, 1, MOST)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.starts, self.rows, self.cols, strict=True)

    @cached_property
    def left(self) -> int:
        return self.rank * sum(self.rows)

    @cached_property
    def right(self) -> int:
        return self.rank * sum(self.cols)

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.starts, tuple(m * n for m, n in zip(self.rows, self.cols, strict=True)))

    def views(self, x: Tensor) -> list[Tensor]:
        return [x[start : start + m * n].view(m, n) for start, m, n in self]

    def factors(self, packed: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """Return views (rank, length) of the factors in a buffer."""
        parts = torch.split(packed, [self.rank * length for length in lengths])
        return [part.view(self.rank, -1) for part in parts]
