"""The sample that DGC estimates a threshold from (Lin et al. 2018, arXiv:1712.01887; release code)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def geometry(n: int, density: float, ratio: float) -> tuple[int, int, int]:
    """Stride, number of samples m and rank in the sample of the threshold; stride 0 says: select exactly.

    At least ceil(ratio * n) and ceil(2 / density) samples, so that two of them are expected above the
    threshold. The stride is odd, one more than a multiple of 8: no power-of-two layout aliases with it.

    >>> geometry(25_000_000, 0.001, 0.01)
    (97, 257731, 258)
    """
    need = math.ceil(min(2 / density, n))  # of a density near 0 it is beyond all numbers
    if n <= need:
        return 0, 0, 0
    wanted = max(math.ceil(n * ratio), need)
    stride = math.ceil(n / wanted / 32) * 32 + 1
    while n // stride < wanted and stride > 1:
        stride -= 8
    samples = n // stride
    return stride, samples, max(1, math.ceil(samples * density))


@lru_cache(maxsize=256)
def sampling(sizes: tuple[int, ...], density: float, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """`geometry` of each size: strides, samples and ranks, int64 (s,)."""
    rows = [geometry(n, density, ratio) for n in sizes]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    strides, samples, ranks = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return strides, samples, ranks
