"""Gradients in a few bits on the way back: powers of two, rounded at random so that the mean is kept.

    t = 2^ceil(log2 max |g|);   levels 0 and t 2^-i, i = 0 .. 2^(bits - 1) - 2, signed;   E[Q(g)] = g

Hubara et al. 2016, arXiv:1609.07061, train with gradients of 6 bits in a logarithmic form, rounded at
random. Recalled: t as the end, the level 0, and rounding in proportion to the distance, are our reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from laconic import kernels

FINE = 2.0**-24


def quantised(g: Tensor, bits: int, key: int) -> Tensor:
    """Q(g), of the shape and dtype of g; a gradient that is not finite stays as it is.

    Error: E|Q(g) - g|^2 <= |g|^2 / 8 + n (s / 2)^2, s = t 2^(2 - 2^(bits - 1)) the least above 0.

    >>> quantised(torch.tensor([8.0, -2.0, 0.0]), bits=3, key=1)
    tensor([ 8., -2.,  0.])
    """
    largest = g.abs().max() if g.numel() else g.new_zeros(())
    if not bool(largest.isfinite()) or not bool(largest > 0):
        return g.clone()
    exponent_of_top = torch.frexp(largest).exponent  # 2^(e - 1) <= largest < 2^e
    if bool(largest == torch.ldexp(largest.new_ones(()), exponent_of_top - 1)):
        exponent_of_top = exponent_of_top - 1
    least = exponent_of_top - ((1 << (bits - 1)) - 2)
    exponent = torch.frexp(g).exponent - 1  # 2^exponent <= |g| < 2^(exponent + 1)
    ones = torch.ones_like(g)
    below = torch.where(exponent < least, torch.zeros_like(g), torch.ldexp(ones, exponent))
    step = torch.ldexp(ones, torch.maximum(exponent, least))
    share = (g.abs() - below) / step
    dither = kernels.dither24(key, g.numel(), device=g.device).view(g.shape).to(g.dtype) * FINE
    return (below + step * (dither < share)) * g.sign()


def rounded_back(x: Tensor, bits: int, key: int) -> Tensor:
    """x unchanged; its gradient is Q of what comes back."""
    out: Tensor = _Rounded.apply(x, bits, key)  # type: ignore[no-untyped-call]
    return out


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, key: int) -> Tensor:
        ctx.how = (bits, key)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return quantised(gradient, *ctx.how), None, None
