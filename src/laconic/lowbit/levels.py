"""Few levels for numbers in [-1, 1], with the straight-through gradient of a hard tanh.

    linear   L = 2^bits - 1;  u = clip(floor((x + 1) L / 2 + 1/2), 0, L);  Q(x) = (2 u - L) / L
    log      Q(x) = sign(x) 2^e, e = clip(round(log2 |x|), 1 - 2^(bits - 1), 0)
    both     dx = dQ where |x| <= 1, else 0

One bit is the sign in both, with sign(0) = 1. Random rounding of the linear form replaces 1/2 by a number in
[0, 1): Q(x) is x on average. Hubara et al. 2016, arXiv:1609.07061; signs: Courbariaux et al. 2016,
arXiv:1602.02830. Ours: linear levels include -1 and 1, so that a level is a sum of signs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from laconic import kernels

FINE = 2.0**-24  # spacing of the dither


def top(bits: int) -> int:
    """Return L, the largest integer level.

    >>> top(1), top(2)
    (1, 3)
    """
    return (1 << bits) - 1


def level_indices(x: Tensor, bits: int, key: int | None = None) -> Tensor:
    """Return u, in the dtype of x. A `key` selects random rounding. NaN stays NaN.

    >>> level_indices(torch.tensor([-2.0, -0.5, 0.0, 0.2, 1.0]), bits=2)
    tensor([0., 1., 2., 2., 3.])
    """
    if key is None:
        if bits == 1:
            # adding 1 would round numbers just below 0 up
            return torch.where(x.isnan(), x, (x >= 0).to(x.dtype))
        moved = (x + 1) * (top(bits) / 2) + 0.5
    else:
        dither = kernels.dither24(key, x.numel(), device=x.device).view(x.shape)
        moved = (x + 1) * (top(bits) / 2) + dither.to(x.dtype) * FINE
    return moved.floor_().clamp_(0, top(bits))


def integers(x: Tensor, bits: int, key: int | None = None) -> Tensor:
    """Return L Q(x) of the linear form: odd integers from -L to L.

    >>> integers(torch.tensor([-2.0, -0.5, 0.0, 0.2, 1.0]), bits=2)
    tensor([-3., -1.,  1.,  1.,  3.])
    """
    out: Tensor = _Integers.apply(x, bits, key)  # type: ignore[no-untyped-call]
    return out


def logarithmic(x: Tensor, bits: int) -> Tensor:
    """Return Q(x) of the logarithmic form: signed powers of two from 2^(1 - 2^(bits - 1)) to 1.

    >>> logarithmic(torch.tensor([-2.0, -0.3, 0.0, 0.7]), bits=2)
    tensor([-1.0000, -0.5000,  0.5000,  0.5000])
    """
    out: Tensor = _Logarithmic.apply(x, bits)  # type: ignore[no-untyped-call]
    return out


class _Integers(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, key: int | None) -> Tensor:
        ctx.save_for_backward(x.abs() <= 1)
        ctx.top = top(bits)
        return level_indices(x, bits, key).mul_(2).sub_(top(bits))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        scaled = gradient if ctx.top == 1 else gradient * ctx.top
        return scaled * inside, None, None


class _Logarithmic(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(x.abs() <= 1)
        exponent = x.abs().log2_().round_().clamp_(1 - (1 << (bits - 1)), 0)
        return torch.where(x >= 0, exponent.exp2(), -exponent.exp2())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None
