"""Shift-based batch normalisation: factors are powers of two.

    c = x - mean;  var = mean(c AP2(c));  y = c AP2(1 / sqrt(var + eps)) AP2(gamma) + beta
    AP2(v) = sign(v) 2^round(log2 |v|)

Courbariaux et al. 2016, arXiv:1602.02830, with the constants of the authors' Torch7 code. Gradients pass AP2
straight through: our reading.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit.gradient import straight_through
from laconic.lowbit.recomputation import is_recomputed
from laconic.optim.powers import nearest_power

MOMENTUM, EPS = 0.125, 1e-5
straight_power = partial(straight_through, nearest_power)


class ShiftBatchNorm(nn.Module):
    """Shift-based BatchNorm of x (n, c) or (n, c, ...), with the state of `nn.BatchNorm2d`.

    Args:
        channels: c.
        device, dtype: As for `nn.BatchNorm2d`.

    >>> x = 5 + 2 * torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
    >>> y = ShiftBatchNorm(3)(x)
    >>> bool((y.mean(0).abs() < 0.01).all()), bool(((y.std(0) - 1).abs() < 0.42).all())
    (True, True)
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, channels: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64, device=device))

    @classmethod
    def of(cls, norm: Any) -> ShiftBatchNorm:
        if not norm.affine or norm.running_mean is None:
            raise AttachError(
                "norm='shift' needs gamma, beta and running values, got a BatchNorm with"
                f" affine={norm.affine}, track_running_stats={norm.track_running_stats}: name it in keep="
            )
        made = cls(norm.num_features, device=norm.weight.device, dtype=norm.weight.dtype).train(norm.training)
        for name in ("weight", "bias"):
            setattr(made, name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        return made

    def forward(self, x: Tensor) -> Tensor:
        along = (-1, *[1] * (x.dim() - 2))
        if self.training:
            over = [0, *range(2, x.dim())]
            mean = x.mean(over)
            centred = x - mean.view(along)
            var = (centred * straight_power(centred)).mean(over)
            if not is_recomputed(self.training):
                with torch.no_grad():
                    self.num_batches_tracked += 1
                    self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), MOMENTUM)
                    self.running_var.lerp_(var.detach().to(self.running_var.dtype), MOMENTUM)
        else:
            centred, var = x - self.running_mean.view(along), self.running_var
        scale = straight_power((var + EPS).rsqrt()) * straight_power(self.weight)
        return centred * scale.view(along) + self.bias.view(along)

    def extra_repr(self) -> str:
        return f"{self.channels}"
