"""Proximal operators as layers that need no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Proximal(nn.Module):
    """A proximal operator at the start of a block: a constraint on the output of the previous block.

    The operator of "X in C" is the projection on C; that of a penalty h(X) is argmin h(Z) + |Z - X|^2 / 2.
    `laconic.admm` does not differentiate it, so it may be a step function. In a plain forward pass autograd
    does: `torch.sign` stops back-propagation.

    Args:
        operator: Function of float32 (rows, ...) to the same shape, of each row independently.

    >>> Proximal(torch.sign)(torch.tensor([[-0.3, 0.7]]))
    tensor([[-1.,  1.]])
    >>> Proximal(lambda x: x.clamp(0, 1))(torch.tensor([[-0.3, 0.7]]))  # a box
    tensor([[0.0000, 0.7000]])
    """

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x)

    @torch.no_grad()
    def learn(self, x: Tensor) -> Tensor:
        """Return the operator's value in a step of X, and update its state, if any."""
        found: Tensor = self(x)
        return found
