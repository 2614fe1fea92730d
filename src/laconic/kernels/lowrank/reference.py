"""Low-rank products in plain torch, with the native code's order of sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.kernels.lowrank.matrices import Matrices

LANES = 32  # partial sums of a row
BLOCK = 256  # rows summed at a time
SPENT = 2.0**-40  # least share of squared length of an independent column


def in_lanes(x: Tensor) -> Tensor:
    """Sum over the last dim: entry j into lane j mod 32; then halves added to halves."""
    filled = pad(x, (0, -x.shape[-1] % LANES))
    lanes = filled.view(*x.shape[:-1], filled.shape[-1] // LANES, LANES)
    total = torch.zeros_like(lanes[..., 0, :])
    for each in lanes.unbind(-2):
        total = total + each
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total.squeeze(-1)


def times(x: Tensor, matrices: Matrices, right: Tensor, left: Tensor) -> None:
    for matrix, q, p in _three(x, matrices, left, right):
        for k in range(matrices.rank):
            p[k] = in_lanes(matrix * q[k])


def transposed_times(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor) -> None:
    for matrix, q, p in _three(x, matrices, left, right):
        blocks = pad(matrix, (0, 0, 0, -len(matrix) % BLOCK)).view(-1, BLOCK, matrix.shape[1])
        for k in range(matrices.rank):
            weights = pad(p[k], (0, -len(matrix) % BLOCK)).view(-1, BLOCK, 1)
            sums = torch.zeros_like(blocks[:, 0])
            for row in range(BLOCK):
                sums = sums + blocks[:, row] * weights[:, row]
            q[k] = 0.0
            for each in sums:
                q[k] += each


def product_add_(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor, alpha: float) -> None:
    for matrix, q, p in _three(x, matrices, left, right):
        product = p[0, :, None] * q[0]
        for k in range(1, matrices.rank):
            product = product + p[k, :, None] * q[k]
        matrix += product * alpha


def orthonormal_(packed: Tensor, rank: int, lengths: tuple[int, ...]) -> None:
    for part in torch.split(packed, [rank * length for length in lengths]):
        columns = part.view(rank, -1).double()
        before = in_lanes(columns * columns)
        for k in range(rank):
            squared = in_lanes(columns[k] * columns[k])
            kept = bool(squared > SPENT * before[k])
            columns[k] = columns[k] / squared.sqrt() if kept else 0.0
            rest = columns[k + 1 :]
            rest -= in_lanes(rest * columns[k])[:, None] * columns[k]
        part.copy_(columns.flatten())


def _three(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    q, p = matrices.factors(right, matrices.cols), matrices.factors(left, matrices.rows)
    return list(zip(matrices.views(x), q, p, strict=True))
