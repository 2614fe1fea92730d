"""Sum of a residual block as a layer."""

from __future__ import annotations

from torch import Tensor, nn

from laconic.lowbit.activation import Activation
from laconic.lowbit.grid import Precision, rounded_gradient


class Add(nn.Module):
    """x + y, for residual blocks: `convert` replaces it by a `QuantAdd`."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class QuantAdd(nn.Module):
    """Q(x) + Q(y), each rounded by its own `Activation`; the gradient is rounded stochastically.

    >>> import torch
    >>> QuantAdd(Precision(bits=8))(torch.zeros(2, 3), torch.ones(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.first = Activation(precision.at("first"))
        self.second = Activation(precision.at("second"))

    @classmethod
    def of(cls, layer: Add, precision: Precision) -> QuantAdd:
        return cls(precision)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = self.first(x) + self.second(y)
        return rounded_gradient(total, self.precision.bits, self.first.key("gradient"))
