"""Low-rank products on another device, by its own library: matrices of one shape in one batch.

The library adds in an order of its own, which may depend on how many matrices are in a batch: the bits are
equal on ranks whose devices and buckets are alike, and near those of the CPU elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.kernels.lowrank.matrices import Matrices
from laconic.kernels.lowrank.reference import SPENT


def times(x: Tensor, matrices: Matrices, right: Tensor, left: Tensor) -> None:
    """P = M Q."""
    p, q = matrices.factors(left, matrices.rows), matrices.factors(right, matrices.cols)
    for same, batch in _batches(x, matrices):
        _put(torch.bmm(_stack(q, same), batch.mT), p, same)


def transposed_times(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor) -> None:
    """Q = M^T P."""
    p, q = matrices.factors(left, matrices.rows), matrices.factors(right, matrices.cols)
    for same, batch in _batches(x, matrices):
        _put(torch.bmm(_stack(p, same), batch), q, same)


def product_add_(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor, alpha: float) -> None:
    """M += alpha * P Q^T."""
    p, q = matrices.factors(left, matrices.rows), matrices.factors(right, matrices.cols)
    views = matrices.views(x)
    for same in _alike(list(zip(matrices.rows, matrices.cols, strict=True))):
        batch = _regular(x, matrices, same)
        if batch is None:
            for i in same:
                views[i].addmm_(p[i].mT, q[i], alpha=alpha)
        else:
            batch.baddbmm_(_stack(p, same).mT, _stack(q, same), alpha=alpha)


def orthonormal_(packed: Tensor, rank: int, lengths: tuple[int, ...]) -> None:
    """Gram-Schmidt in float64, column after column; a column that depends on those before it becomes 0."""
    parts = [part.view(rank, -1) for part in torch.split(packed, [rank * length for length in lengths])]
    for same in _alike(list(lengths)):
        columns = _stack(parts, same).double()
        before = columns.square().sum(-1)
        for k in range(rank):
            squared = columns[:, k].square().sum(-1, keepdim=True)
            kept = squared > SPENT * before[:, k, None]
            columns[:, k] = torch.where(kept, columns[:, k] / squared.sqrt(), 0.0)
            rest = columns[:, k + 1 :]
            rest -= (rest @ columns[:, k, :, None]) * columns[:, k, None]
        _put(columns, parts, same)


def _batches(x: Tensor, matrices: Matrices) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of matrices of one shape, and they themselves (b, rows, cols): a view where they lie evenly."""
    views = matrices.views(x)
    for same in _alike(list(zip(matrices.rows, matrices.cols, strict=True))):
        batch = _regular(x, matrices, same)
        yield same, _stack(views, same) if batch is None else batch


def _regular(x: Tensor, matrices: Matrices, same: list[int]) -> Tensor | None:
    """These matrices of flat x as one view (b, rows, cols), if one distance lies between them all."""
    starts = [matrices.starts[i] for i in same]
    m, n = matrices.rows[same[0]], matrices.cols[same[0]]
    distance = starts[1] - starts[0] if len(same) > 1 else m * n
    if distance < m * n or starts != [starts[0] + i * distance for i in range(len(same))]:
        return None
    return x.as_strided((len(same), m, n), (distance, n, 1), x.storage_offset() + starts[0])


def _alike(shapes: list[object]) -> list[list[int]]:
    """Numbers of those of each shape."""
    numbers: dict[object, list[int]] = {}
    for i, shape in enumerate(shapes):
        numbers.setdefault(shape, []).append(i)
    return list(numbers.values())


def _stack(parts: list[Tensor], same: list[int]) -> Tensor:
    return torch.stack([parts[i] for i in same])


def _put(values: Tensor, parts: list[Tensor], same: list[int]) -> None:
    for i, value in zip(same, values, strict=True):
        parts[i].copy_(value)
