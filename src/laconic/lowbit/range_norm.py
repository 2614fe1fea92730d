"""Low-bit norms with the range of values instead of the variance.

    y = Q(gamma) (x - mean) Q(scale) + Q(beta),   x in low bits, dy rounded at random

Banner et al. 2018, arXiv:1805.11046 (range batch norm), as in the code of Aketi et al. 2021. `RangeGroupNorm`
is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit.activation import DECAY, Activation
from laconic.lowbit.grid import Precision, fitted, rounded_gradient
from laconic.lowbit.layers import EIGHT
from laconic.lowbit.range_scale import range_scale
from laconic.lowbit.recomputation import is_recomputed


class _LowBitNorm(nn.Module):
    def __init__(
        self, channels: int, affine: bool, precision: Precision, device: torch.device | None
    ) -> None:
        super().__init__()
        self.channels = channels
        self.precision = precision
        self.inputs = Activation(precision, device)
        self.weight = (
            nn.Parameter(torch.ones(channels, dtype=torch.float32, device=device)) if affine else None
        )
        self.bias = (
            nn.Parameter(torch.zeros(channels, dtype=torch.float32, device=device)) if affine else None
        )

    def out(self, x: Tensor) -> Tensor:
        along = (-1, *[1] * (x.dim() - 2))
        if self.weight is not None and self.bias is not None:
            bits = self.precision.bits
            x = x * fitted(self.weight, bits).view(along) + fitted(self.bias, bits).view(along)
        return rounded_gradient(x, self.precision.bits, self.inputs.key("gradient"))


class RangeNorm(_LowBitNorm):
    """Low-bit BatchNorm of x (n, c, ...) by each channel's mean and range.

    The range is averaged over 16 chunks. Evaluation uses running values, 0.9 of them from the rank's last
    batch: for skewed shards use `RangeEvoNorm`.

    Args:
        channels: c.
        affine: Whether there are gamma and beta.
        precision: Bits, rounding and seed.
        device: Of parameters and running values.

    >>> y = RangeNorm(3)(5 + 2 * torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    >>> bool((y.mean((0, 2, 3)).abs() < 0.01).all()), bool(((y.std((0, 2, 3)) - 1).abs() < 0.2).all())
    (True, True)
    """

    running_mean: Tensor
    running_scale: Tensor

    def __init__(
        self,
        channels: int,
        affine: bool = True,
        *,
        precision: Precision = EIGHT,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(channels, affine, precision, device)
        self.register_buffer("running_mean", torch.zeros(channels, dtype=torch.float32, device=device))
        self.register_buffer("running_scale", torch.ones(channels, dtype=torch.float32, device=device))

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, precision: Precision) -> RangeNorm:
        if norm.running_mean is None or norm.running_var is None:
            raise AttachError(
                "a range norm needs running statistics, got BatchNorm2d(track_running_stats=False): use"
                " GroupNorm"
            )
        made = cls(norm.num_features, norm.affine, precision=precision, device=norm.running_mean.device)
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean.copy_(norm.running_mean)
        made.running_scale.copy_((norm.running_var + norm.eps).rsqrt())
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        if self.training:
            rows = x.transpose(0, 1).flatten(1)
            mean, scale = rows.mean(1), range_scale(rows)
            if not is_recomputed(self.training):
                self.running_mean.mul_(DECAY).add_(mean.detach(), alpha=1 - DECAY)
                self.running_scale.mul_(DECAY).add_(scale.detach(), alpha=1 - DECAY)
        else:
            mean, scale = self.running_mean, self.running_scale
        along = (-1, *[1] * (x.dim() - 2))
        return self.out((x - mean.view(along)) * fitted(scale, self.precision.bits).view(along))


class RangeGroupNorm(_LowBitNorm):
    """Low-bit GroupNorm of x (n, c, ...) by the mean and range of each example's groups.

    Args:
        groups: Groups of channels.
        channels: c, a multiple of `groups`.
        affine, precision, device: As for `RangeNorm`.

    >>> RangeGroupNorm(2, 4)(torch.randn(3, 4, 8, 8)).shape
    torch.Size([3, 4, 8, 8])
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        affine: bool = True,
        *,
        precision: Precision = EIGHT,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(channels, affine, precision, device)
        self.groups = groups

    @classmethod
    def of(cls, norm: nn.GroupNorm, precision: Precision) -> RangeGroupNorm:
        device = norm.weight.device if norm.affine else None
        made = cls(norm.num_groups, norm.num_channels, norm.affine, precision=precision, device=device)
        made.weight, made.bias = norm.weight, norm.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        rows = x.reshape(len(x), self.groups, -1)
        scale = fitted(range_scale(rows), self.precision.bits)
        return self.out(((rows - rows.mean(-1, keepdim=True)) * scale[..., None]).view(x.shape))
