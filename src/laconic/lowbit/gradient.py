"""Custom gradients: straight-through, or changed in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def straight_through(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), with the gradient of x itself.

    >>> import torch
    >>> x = torch.tensor([1.4], requires_grad=True)
    >>> y = straight_through(torch.round, x)
    >>> y.backward()
    >>> y.item(), x.grad.item()
    (1.0, 1.0)
    """
    out: Tensor = _Straight.apply(function, x)  # type: ignore[no-untyped-call]
    return out


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x; its gradient is `change(gradient)`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with_gradient(x, lambda gradient: gradient.round()).mul(1.4).sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    out: Tensor = _Changed.apply(x, change)  # type: ignore[no-untyped-call]
    return out


class _Straight(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class _Changed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None
