"""The large entries of a tensor, as their values and one bit per entry that says where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import kernels


def threshold(x: Tensor, count: int) -> float:
    """The `count`-th largest |x| of x of any shape; 0 for a tensor without entries.

    >>> threshold(torch.tensor([0.1, -3.0, 2.0]), 2)
    2.0
    """
    if x.numel() == 0:
        return 0.0
    return x.detach().abs().flatten().kthvalue(x.numel() - count + 1).values.item()


def largest(x: Tensor, least: float) -> Tensor:
    """x with zero in place of each entry with |x| < `least`. NaN stays, so that it is seen.

    >>> largest(torch.tensor([0.1, -3.0, 2.0]), 2.0)
    tensor([ 0., -3.,  2.])
    """
    return x.masked_fill(x.abs() < least, 0)


def pack(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """What `largest(x, least)` holds beside zeros.

    Returns:
        Bits uint8 (ceil(n / 8),) of the n entries in order, the first in the lowest bit; and the k values
        whose bit is set, in the dtype of x: ceil(n / 8) + k * itemsize bytes.

    >>> bits, values = pack(torch.tensor([0.1, -3.0, 2.0]), 2.0)
    >>> bits.tolist(), values.tolist()
    ([6], [-3.0, 2.0])
    """
    flat = x.detach().flatten()
    kept = ~(flat.abs() < least) & (flat != 0)
    return kernels.pack_bits(kept.int(), 1), flat[kept]


def unpack(bits: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """The dense tensor of this shape that `pack` was given, with zeros where nothing was kept."""
    kept = kernels.unpack_bits(bits, 1, shape.numel()).bool()
    return values.new_zeros(shape.numel()).masked_scatter_(kept, values).view(shape)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the entries of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
