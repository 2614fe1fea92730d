"""Products with the large weights, which save the large inputs for backward.

    y = w_s x + b;  dx = w_s^T dy;  dw = dy x_s^T, for every entry of w;  db = sum of dy

w_s and x_s have zeros below a threshold (SWAT, arXiv:2001.01969). x_s is packed (`bitmask`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from laconic.sparsity.bitmask import largest, unpack

Packed = tuple[Tensor, Tensor]  # bits and values
Shape = tuple[Any, Any, Any, int]  # stride, padding, dilation, groups


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, least: float, kept: Packed, shape: Shape
) -> Tensor:
    """Return `F.conv2d` with the weights |w| >= `least`; backward uses the packed `kept`."""
    out: Tensor = _Conv2d.apply(x, weight, bias, least, *kept, shape)  # type: ignore[no-untyped-call]
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, least: float, kept: Packed) -> Tensor:
    out: Tensor = _Linear.apply(x, weight, bias, least, *kept)  # type: ignore[no-untyped-call]
    return out


class _Conv2d(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        least: float,
        bits: Tensor,
        values: Tensor,
        shape: Shape,
    ) -> Tensor:
        ctx.save_for_backward(weight, bits, values)
        ctx.least, ctx.shape, ctx.of_x = least, shape, x.shape
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(x, largest(weight, least), bias, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bits, values = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.shape
        wanted = ctx.needs_input_grad[:3]
        shape_only = weight.new_empty(1).expand(ctx.of_x)
        x = unpack(bits, values, ctx.of_x) if wanted[1] else shape_only
        gradients = torch.ops.aten.convolution_backward(
            dy,
            x,
            largest(weight, ctx.least),
            [weight.shape[0]],
            stride,
            padding,
            dilation,
            False,  # not transposed
            [0, 0],
            groups,
            wanted,
        )
        return (*gradients, None, None, None, None)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, least: float, bits: Tensor, values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, bits, values)
        ctx.least, ctx.of_x = least, x.shape
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, largest(weight, least), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bits, values = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy @ largest(weight, ctx.least)
        if ctx.needs_input_grad[1]:
            dw = flat.T @ unpack(bits, values, ctx.of_x).reshape(-1, ctx.of_x[-1])
        if ctx.needs_input_grad[2]:
            db = flat.sum(0)
        return dx, dw, db, None, None, None
