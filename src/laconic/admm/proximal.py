"""Proximal: a layer that a block's output must satisfy, and that needs no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Proximal(nn.Module):
    """A proximal operator at the start of a block: it constrains what the block before it gives.

    A constraint "X in C" has the projection on C as its operator, a penalty h(X) argmin h(Z) + |Z - X|^2 / 2.
    In training `laconic.admm` applies it to X and never differentiates it, so it may be a step function. In a
    plain forward pass it is an activation, whose gradient is whatever autograd makes of the operator: with
    `torch.sign` it is 0, and back-propagation does not train the layers before it.

    Args:
        operator: float32 (rows, ...) to the same shape; each row by itself.

    >>> Proximal(torch.sign)(torch.tensor([[-0.3, 0.7]]))
    tensor([[-1.,  1.]])
    >>> Proximal(lambda x: x.clamp(0, 1))(torch.tensor([[-0.3, 0.7]]))  # a box
    tensor([[0.0000, 0.7000]])
    """

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        """The operator's value: the same shape."""
        return self.operator(x)

    @torch.no_grad()
    def learn(self, x: Tensor) -> Tensor:
        """The operator's value in a step of X; an operator with state of its own learns from it."""
        found: Tensor = self(x)
        return found
