"""Change of a gradient on its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x; its gradient is `change` of the gradient that comes back.

    >>> x = torch.ones(2, requires_grad=True)
    >>> with_gradient(x, lambda gradient: gradient.round()).mul(1.4).sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    out: Tensor = _Changed.apply(x, change)  # type: ignore[no-untyped-call]
    return out


class _Changed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None
