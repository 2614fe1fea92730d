"""Low-rank products in Triton: one launch per bucket; factors of up to 4 columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.lowrank import grids
from laconic.kernels.lowrank.grids import COLS, HEIGHT, LENGTH, PART, ROWS, TALL, WIDE
from laconic.kernels.lowrank.matrices import Matrices
from laconic.kernels.lowrank.reference import SPENT
from laconic.kernels.lowrank.triton_kernels import (
    orthonormal_kernel,
    product_add_kernel,
    times_kernel,
    total_kernel,
    transposed_times_kernel,
)


def times(x: Tensor, matrices: Matrices, right: Tensor, left: Tensor) -> None:
    grid, tables = grids.rows(matrices, x.device)
    _launch(times_kernel, grid, x, right, left, *tables, matrices.rank, ROWS, COLS)


def transposed_times(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor) -> None:
    grid, tables, numel, second, totals = grids.columns(matrices, x.device)
    sums = torch.empty(numel, dtype=torch.float32, device=x.device)
    _launch(transposed_times_kernel, grid, x, left, sums, *tables, matrices.rank, HEIGHT, TALL, WIDE)
    _launch(total_kernel, second, sums, right, *totals, PART)


def product_add_(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor, alpha: float) -> None:
    grid, tables = grids.rows(matrices, x.device)
    _launch(product_add_kernel, grid, x, left, right, float(alpha), *tables, matrices.rank, ROWS, COLS)


def orthonormal_(packed: Tensor, rank: int, lengths: tuple[int, ...]) -> None:
    grid, tables = grids.factors(rank, lengths, packed.device)
    work = torch.empty(packed.numel(), dtype=torch.float64, device=packed.device)
    _launch(orthonormal_kernel, grid, packed, work, *tables, SPENT, rank, full_of(rank), LENGTH)


def full_of(rank: int) -> int:
    return 1 << (rank - 1).bit_length()


def _launch(kernel: Any, grid: tuple[int], x: Tensor, *arguments: Any) -> None:
    if grid[0]:
        with dispatch.device_of(x):
            launch(kernel, grid, x, *arguments)
