"""Inputs and plain equations for tests of low-bit layers, in Python's own numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.lowbit import Precision
from laconic.lowbit.grid import LEAST
from laconic.lowbit.range_scale import range_constant

EIGHT = Precision()
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums in another order


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def twin(x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """Q, an element at a time, in Python's own numbers."""
    most = 2**bits - 1
    s = max((high - low) / most, LEAST)
    values = [round(min(max((v - low) / s, 0), most)) * s + low for v in x.flatten().tolist()]
    return torch.tensor(values).view(x.shape)


def plain_scale(x: Tensor) -> float:
    """The range scale of one row, chunk by chunk."""
    cut = x.flatten().tolist()
    m = len(cut) // 16
    parts = [cut[k * m : (k + 1) * m] for k in range(16)]
    spread = sum(map(max, parts)) / 16 - sum(map(min, parts)) / 16
    return 1 / (range_constant(m) * spread + 1e-5)
