"""Min-max sketch: a small integer per element in fewer table cells; queries never exceed it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.turn import mix
from laconic.kernels.philox import philox

ROW = 0x4D696E4D6178  # seed of all rows' keys


@dataclass(frozen=True)
class SketchShape:
    """`groups` tables of `rows` by `columns` cells, each with a bin below `width`."""

    groups: int
    rows: int
    columns: int
    width: int

    @property
    def cells(self) -> int:
        return self.groups * self.rows * self.columns


def sketch_insert(bins: Tensor, groups: Tensor, shape: SketchShape) -> Tensor:
    """Return tables int64 (cells,), [group, row, column]: the least bin of each cell.

    bins int64 (n,) in 0..width - 1 and groups int64 (n,) in 0..groups - 1, of elements 0..n - 1. An empty
    cell holds width - 1.
    """
    table = torch.full((shape.cells,), shape.width - 1, dtype=torch.int64, device=bins.device)
    for row in range(shape.rows):
        table.scatter_reduce_(0, _cells(groups, row, shape), bins, "amin")
    return table


def sketch_query(table: Tensor, groups: Tensor, shape: SketchShape) -> Tensor:
    """Return the bin of each element, int64 (n,): never above the inserted one, often equal.

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
    words = philox(mix(ROW, row), groups.numel(), device=groups.device).to(torch.int64) & 0xFFFFFFFF
    return (groups * shape.rows + row) * shape.columns + (words * shape.columns >> 32)
