"""Products with two precisions in backward.

    y = w x;  dx = w^T Q(dy), rounded at random between the ends of dy;  dw = dy x^T

Banner et al. 2018, arXiv:1805.11046.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight

from laconic.lowbit.grid import ends, quantise

Pair = tuple[int, int]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    bits: int,
    key: int,
) -> Tensor:
    """Return `F.conv2d` of float32 x (n, c, h, w); `bits` and `key` round dy for dx."""
    shape = (stride, padding, dilation, groups)
    out: Tensor = _Conv2d.apply(x, weight, bias, shape, (bits, key))  # type: ignore[no-untyped-call]
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, bits: int, key: int) -> Tensor:
    out: Tensor = _Linear.apply(x, weight, bias, (bits, key))  # type: ignore[no-untyped-call]
    return out


class _Conv2d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Any, rounding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.rounding = shape, rounding
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(x, weight, bias, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            rounded = quantise(dy, *ends(dy), *ctx.rounding)
            dx = conv2d_input(x.shape, weight, rounded, *ctx.shape)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            dw = conv2d_weight(x, weight.shape, dy, *ctx.shape)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[2]:
            db = dy.sum((0, 2, 3))
        return dx, dw, db, None, None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = quantise(dy, *ends(dy), *ctx.rounding) @ weight
        if ctx.needs_input_grad[1]:
            dw = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dw, db, None
