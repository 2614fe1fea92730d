"""Gradients in few bits: powers of two with unbiased random rounding.

    t = 2^ceil(log2 max |g|);   levels 0 and t 2^-i, i = 0 .. 2^(bits - 1) - 2, signed;   E[Q(g)] = g

Hubara et al. 2016, arXiv:1609.07061. Our reading: t, the level 0 and the probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import kernels
from laconic.lowbit.gradient import with_gradient

FINE = 2.0**-24
EXPONENT = 0x7F800000  # of a float32: [sign | exponent 8 | mantissa 23]


def quantise_gradient(g: Tensor, bits: int, key: int) -> Tensor:
    """Return Q(g), in the dtype of g; g if it is not finite.

    Error: E|Q(g) - g|^2 <= |g|^2 / 8 + n (s / 2)^2, with s = t 2^(2 - 2^(bits - 1)) the least positive level.

    >>> quantise_gradient(torch.tensor([8.0, -2.0, 0.0]), bits=3, key=1)
    tensor([ 8., -2.,  0.])
    """
    size = g.detach().float().abs()
    largest = size.max() if g.numel() else size.new_zeros(())
    if not bool(largest.isfinite()) or not bool(largest > 0):
        return g.clone()
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa 2^exponent, 1/2 <= mantissa < 1
    top = int(exponent) - int(mantissa == 0.5)
    least = 2.0 ** (2 - (1 << (bits - 1)))  # relative; at least 2^-126
    share = _scale_(size, -top)
    below = (share.view(torch.int32) & EXPONENT).view(torch.float32)  # 2^e <= share < 2^(e + 1)
    step = below.clamp(min=least)
    below.mul_(below >= least)
    share.sub_(below).div_(step)
    dither = kernels.dither24(key, g.numel(), device=g.device).view(g.shape).float().mul_(FINE)
    rounded = below.add_(step.mul_(dither < share))
    return _scale_(rounded, top).copysign_(g).to(g.dtype)


def _scale_(x: Tensor, exponent: int) -> Tensor:
    """Multiply x by 2^exponent in two factors, as one may exceed float32."""
    half = exponent // 2
    return x.mul_(2.0**half).mul_(2.0 ** (exponent - half))


def round_gradient(x: Tensor, bits: int, key: int) -> Tensor:
    return with_gradient(x, lambda gradient: quantise_gradient(gradient, bits, key))
