"""EvoNorm: norm and activation in one layer, without batch statistics.

    EvoNormS0       y = gamma x sigmoid(v x) / sqrt(var + 1e-5) + beta
    RangeEvoNorm    y = Q(gamma) x hardsigmoid(Q(v) x) Q(scale) + Q(beta)

var: variance of x per example and group of channels; scale: `range_scale`. Liu et al. 2020, arXiv:2004.02967;
low-bit form: code of Aketi et al. 2021, arXiv:2111.09389. One EvoNorm replaces a BatchNorm2d and its ReLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.lowbit.activation import Activation
from laconic.lowbit.grid import Precision, fitted, rounded_gradient
from laconic.lowbit.layers import EIGHT
from laconic.lowbit.range_scale import range_scale

EPS = 1e-5


class EvoNormS0(nn.Module):
    """Float32 EvoNorm of x (n, c, h, w). Parameters `weight` gamma, `bias` beta and `v`, (c,).

    Args:
        channels: c, a multiple of `groups`.
        groups: Groups of channels that share a variance.
        device, dtype: As for `nn.BatchNorm2d`.

    >>> EvoNormS0(16)(torch.randn(2, 16, 4, 4)).shape
    torch.Size([2, 16, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        groups: int = 8,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channels % groups:
            raise ValueError(f"groups must divide channels, got {groups} groups of {channels} channels")
        self.channels, self.groups = channels, groups
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, v = (each.view(-1, 1, 1) for each in (self.weight, self.bias, self.v))
        rows = x.reshape(len(x), self.groups, -1)
        scale = (rows.var(-1, correction=0) + EPS).rsqrt()
        return by_group(x * torch.sigmoid(v * x), scale) * weight + bias


class RangeEvoNorm(nn.Module):
    """Low-bit EvoNorm: rounds to nearest, and gradients at random.

    Args:
        channels: c, a multiple of `groups`.
        groups: Groups of channels that share a scale.
        precision: Bits, rounding and seed.
        device: Device of the parameters.

    >>> RangeEvoNorm(16)(torch.randn(2, 16, 4, 4)).shape
    torch.Size([2, 16, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        groups: int = 8,
        *,
        precision: Precision = EIGHT,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        like = EvoNormS0(channels, groups, device=device, dtype=torch.float32)
        self.channels, self.groups = channels, groups
        self.weight, self.bias, self.v = like.weight, like.bias, like.v
        self.precision = precision
        self.inputs = Activation(precision, device)

    @classmethod
    def of(cls, norm: EvoNormS0, precision: Precision) -> RangeEvoNorm:
        made = cls(norm.channels, norm.groups, precision=precision, device=norm.weight.device)
        made.weight, made.bias, made.v = norm.weight, norm.bias, norm.v
        return made

    def forward(self, x: Tensor) -> Tensor:
        bits = self.precision.bits
        weight, bias, v = (fitted(each, bits).view(-1, 1, 1) for each in (self.weight, self.bias, self.v))
        x = self.inputs(x)
        scale = fitted(range_scale(x.reshape(len(x), self.groups, -1)), bits)
        y = by_group(x * F.hardsigmoid(v * x), scale) * weight + bias
        return rounded_gradient(y, bits, self.inputs.key("gradient"))


def by_group(x: Tensor, scale: Tensor) -> Tensor:
    return (x.reshape(*scale.shape, -1) * scale[..., None]).view(x.shape)
