"""Stochastic rounding from float32 to 16 bits: up or down at random, so that the mean is exact.

Rounding to nearest loses small updates (Gupta et al. 2015, arXiv:1502.02551 [recalled]). With x between its
neighbours t (towards zero) and u:

    P(u) = (|x| - |t|) / (|u| - |t|)        E = x

u is t with its bits, as an integer [sign | exponent | mantissa], plus one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import kernels

HALF = (torch.bfloat16, torch.float16)
FINE = 1 << 24  # thresholds are multiples of 2^-24


def round_at_random(x: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """Round float32 x to bfloat16 or float16 at random; the same key gives the same bits.

    Unbiased, except for float16's denormals: a bias below 2^-24 of a step. NaN, Inf and values on the grid
    stay; finite values beyond the largest become the largest.

    >>> x = torch.full((1000,), 1 + 2**-9)  # a quarter of a step above 1
    >>> round_at_random(x, torch.bfloat16, key=1).unique().tolist()
    [1.0, 1.0078125]
    >>> bool((round_at_random(x, torch.bfloat16, key=1) == 1).float().mean() > 0.7)
    True
    """
    flat = x.detach().reshape(-1)
    toward = flat.to(dtype)
    beyond = toward.float().abs() > flat.abs()
    bits = toward.view(torch.int16)
    toward = (bits - beyond.to(torch.int16)).view(dtype)
    away = (toward.view(torch.int16) + 1).view(dtype)
    low, high = toward.float().abs(), away.float().abs()
    share = (flat.abs() - low).div_(high - low)
    threshold = share.mul_(FINE).nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)
    up = kernels.dither24(key, flat.numel(), device=flat.device) < threshold
    rounded = torch.where(up, away, toward)
    return torch.where(flat.isfinite(), rounded, flat.to(dtype)).view(x.shape)
