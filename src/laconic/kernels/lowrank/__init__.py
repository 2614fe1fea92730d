"""Products of matrices with thin factors, and orthonormalisation of their columns.

CPU sums have a fixed order, whatever buffer, threads and machine: ranks agree. GPUs use `gpu`; many columns
and other devices `batched`.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from laconic.kernels import checks, dispatch
from laconic.kernels.lowrank import batched, reference
from laconic.kernels.lowrank.matrices import NARROW
from laconic.kernels.lowrank.matrices import Matrices as Matrices


def times(x: Tensor, matrices: Matrices, right: Tensor) -> Tensor:
    """Return P = M Q of each matrix in flat x float32 (n,): left factors float32 (matrices.left,).

    >>> x, one = torch.tensor([1.0, 2.0, 3.0, 4.0]), Matrices((0,), (2,), (2,), rank=1)
    >>> times(x, one, torch.tensor([1.0, -1.0])).tolist()
    [-1.0, -1.0]
    """
    _check(x, matrices, right=right)
    left = x.new_empty(matrices.left)
    if not len(matrices):
        return left
    if (native := dispatch.native(x, right)) is not None:
        native.lowrank_times(x, matrices, right, left)
    else:
        _module(matrices.rank, x, right).times(x, matrices, right, left)
    return left


def transposed_times(x: Tensor, matrices: Matrices, left: Tensor) -> Tensor:
    """Return Q = M^T P: right factors float32 (matrices.right,)."""
    _check(x, matrices, left=left)
    right = x.new_empty(matrices.right)
    if not len(matrices):
        return right
    if (native := dispatch.native(x, left)) is not None:
        native.lowrank_transposed_times(x, matrices, left, right)
    else:
        _module(matrices.rank, x, left).transposed_times(x, matrices, left, right)
    return right


def product_add_(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha * P Q^T, in place, to each matrix in flat x float32 (n,)."""
    _check(x, matrices, left=left, right=right)
    if not len(matrices):
        return x
    if (native := dispatch.native(x, left, right)) is not None:
        native.lowrank_product_add_(x, matrices, left, right, alpha)
    else:
        _module(matrices.rank, x, left, right).product_add_(x, matrices, left, right, alpha)
    return x


def orthonormal_(packed: Tensor, rank: int, lengths: tuple[int, ...]) -> Tensor:
    """Orthonormalise the `rank` columns of each factor, in place: Gram-Schmidt in order, in float64.

    `packed` float32: consecutive factors, each `rank` columns of its length. A column that keeps less than
    2^-20 of its length becomes zero.

    >>> orthonormal_(torch.tensor([3.0, 4.0, 3.0, 4.0, 5.0, 0.0]), rank=3, lengths=(2,)).view(3, 2).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0], [0.800000011920929, -0.6000000238418579]]
    """
    checks.flat("packed", packed)
    if packed.numel() != rank * sum(lengths):
        raise ValueError(
            f"factors of rank {rank} and lengths {lengths} do not fill {packed.numel()} elements"
        )
    if not packed.numel():
        return packed
    if (native := dispatch.native(packed)) is not None:
        native.lowrank_orthonormal_(packed, rank, torch.tensor(lengths, dtype=torch.int64, device="cpu"))
    else:
        _module(rank, packed).orthonormal_(packed, rank, lengths)
    return packed


def _module(rank: int, *tensors: Tensor) -> ModuleType:
    if tensors[0].is_cpu:
        return reference
    if rank <= NARROW and dispatch.gpu(*tensors):
        from laconic.kernels.lowrank import gpu

        return gpu
    return batched


def _check(x: Tensor, matrices: Matrices, left: Tensor | None = None, right: Tensor | None = None) -> None:
    checks.buffer("x", x, matrices.segments)
    for name, packed, numel in (("left", left, matrices.left), ("right", right, matrices.right)):
        if packed is not None:
            checks.flat(name, packed)
            if packed.numel() != numel:
                raise ValueError(f"{name} factors must have {numel} elements, got {packed.numel()}")
