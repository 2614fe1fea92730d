"""Layers of SWAT: sparse weights in forward, sparse inputs saved for backward.

    y = conv(x, w_s) + b;  dx = conv^T(dy, w_s);  dw from dy and x_s;  db = sum of dy

w_s and x_s: the largest entries of w, and of x over the whole batch (our reading). Raihan and Aamodt 2020,
arXiv:2001.01969, checked against the authors' code. Evaluation uses the top-k of the current weights (our
reading). Layers compute in their weight's dtype, also under autocast.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.sparsity import products
from laconic.sparsity.bitmask import largest
from laconic.sparsity.thresholds import Thresholds
from laconic.transforms.transformed import TransformedLayer


class _Swat(TransformedLayer):
    refusal: ClassVar[str] = "is sparse already, by swat()"
    thresholds: Thresholds

    @classmethod
    def of(cls, layer: nn.Module, thresholds: Thresholds) -> Any:
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made.thresholds = thresholds
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.thresholds}"  # type: ignore[no-untyped-call,unused-ignore]


class SwatConv2d(_Swat, nn.Conv2d):
    """Zero-padded convolution of x (n, c, h, w) or (c, h, w), with sparse weights.

    Saves n / 8 bytes and the density * n largest of n input entries.
    """

    @classmethod
    def of(cls, layer: nn.Module, thresholds: Thresholds) -> Any:
        assert isinstance(layer, nn.Conv2d)
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise AttachError(
                f"padding of a sparse convolution must be a number of zeros, got padding={layer.padding!r},"
                f" padding_mode={layer.padding_mode!r}: pad in a layer before it, such as nn.ReflectionPad2d"
            )
        return super().of(layer, thresholds)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None])[0]
        x = x.to(self.weight.dtype)
        shape = (self.stride, self.padding, self.dilation, self.groups)
        if not torch.is_grad_enabled():
            weight = largest(self.weight, self.thresholds.of_weight(self.weight, self.training))
            with torch.autocast(x.device.type, enabled=False):
                return F.conv2d(x, weight, self.bias, *shape)  # type: ignore[arg-type]  # no string
        least, kept = self.thresholds.batch(x, self.weight, self.training)
        return products.conv2d(x, self.weight, self.bias, least, kept, shape)


class SwatLinear(_Swat, nn.Linear):
    """Linear layer of x (..., c), with sparse weights and saved inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if not torch.is_grad_enabled():
            weight = largest(self.weight, self.thresholds.of_weight(self.weight, self.training))
            with torch.autocast(x.device.type, enabled=False):
                return F.linear(x, weight, self.bias)
        least, kept = self.thresholds.batch(x, self.weight, self.training)
        return products.linear(x, self.weight, self.bias, least, kept)
