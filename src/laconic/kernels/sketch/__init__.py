"""Min-max sketch: a small number for each of n elements in a table of fewer cells, never too large.

In plain torch on any device; there is no native code. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.turn import mix
from laconic.kernels.philox import philox

ROW = 0x4D696E4D6178  # source of the keys of all rows


@dataclass(frozen=True)
class SketchShape:
    """`groups` tables of `rows` by `columns` cells, each with a bin below `width`."""

    groups: int
    rows: int
    columns: int
    width: int

    @property
    def cells(self) -> int:
        """Number of cells of all tables."""
        return self.groups * self.rows * self.columns


def sketch_insert(bins: Tensor, groups: Tensor, shape: SketchShape) -> Tensor:
    """Return the tables int64 (cells,), [group, row, column]: in each cell the least bin that was put there.

    bins int64 (n,) in 0..width - 1 and groups int64 (n,) in 0..groups - 1, of elements 0..n - 1. A cell
    without an element holds width - 1.
    """
    table = torch.full((shape.cells,), shape.width - 1, dtype=torch.int64, device=bins.device)
    for row in range(shape.rows):
        table.scatter_reduce_(0, _cells(groups, row, shape), bins, "amin")
    return table


def sketch_query(table: Tensor, groups: Tensor, shape: SketchShape) -> Tensor:
    """Return the bin of each element, int64 (n,): never above the one inserted, and often the same.

    >>> shape = SketchShape(groups=1, rows=2, columns=3, width=8)
    >>> bins, groups = torch.tensor([7, 2, 5, 0, 6]), torch.zeros(5, dtype=torch.int64)
    >>> sketch_query(sketch_insert(bins, groups, shape), groups, shape).tolist()
    [5, 2, 5, 0, 6]
    """
    found = torch.zeros_like(groups)
    for row in range(shape.rows):
        found = torch.maximum(found, table[_cells(groups, row, shape)])
    return found


def _cells(groups: Tensor, row: int, shape: SketchShape) -> Tensor:
    """Return the position in the tables of each element's cell of a row, int64 (n,)."""
    words = philox(mix(ROW, row), groups.numel(), device=groups.device).to(torch.int64) & 0xFFFFFFFF
    return (groups * shape.rows + row) * shape.columns + (words * shape.columns >> 32)
