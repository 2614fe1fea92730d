"""Bitmask format of sparse tensors: one bit per entry, and the values of the set bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import kernels


def threshold(x: Tensor, count: int) -> float:
    """Return the `count`-th largest |x|; 0 if x is empty.

    >>> threshold(torch.tensor([0.1, -3.0, 2.0]), 2)
    2.0
    """
    if x.numel() == 0:
        return 0.0
    return x.detach().abs().flatten().kthvalue(x.numel() - count + 1).values.item()


def largest(x: Tensor, least: float) -> Tensor:
    """Return x with zeros where |x| < `least`. NaN stays.

    >>> largest(torch.tensor([0.1, -3.0, 2.0]), 2.0)
    tensor([ 0., -3.,  2.])
    """
    return x.masked_fill(x.abs() < least, 0)


def pack(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the nonzero entries of `largest(x, least)`.

    Returns:
        Bits uint8 (ceil(n / 8),), first entry lowest, and k values in the dtype of x: ceil(n / 8) + k *
        itemsize bytes.

    >>> bits, values = pack(torch.tensor([0.1, -3.0, 2.0]), 2.0)
    >>> bits.tolist(), values.tolist()
    ([6], [-3.0, 2.0])
    """
    flat = x.detach().flatten()
    kept = ~(flat.abs() < least) & (flat != 0)
    return kernels.pack_bits(kept.int(), 1), flat[kept]


def unpack(bits: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    kept = kernels.unpack_bits(bits, 1, shape.numel()).bool()
    return values.new_zeros(shape.numel()).masked_scatter_(kept, values).view(shape)


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
