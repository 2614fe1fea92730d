"""Layers with few-bit weights and inputs, and float32 master weights.

    y = Q(w) Q(x) + b;  dx = Q(w)^T Q(dy) where |x| <= 1;  dw = Q(dy) Q(x)^T where |w| <= 1

Hubara et al. 2016, arXiv:1609.07061; with one bit, Courbariaux et al. 2016, arXiv:1602.02830. Q: see
`laconic.lowbit.levels`. Products of levels are exact integers below 2^24, and the bias is added last: a
packed layer has the same bits. Padding counts as 0. Layers compute in their weight's dtype, also under
autocast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit import clipping
from laconic.lowbit.few_bits import Rounding
from laconic.transforms.transformed import TransformedLayer


class FewBitLayer(TransformedLayer):
    refusal: ClassVar[str] = "has few bits already"
    rounding: Rounding

    @classmethod
    def of(cls, layer: Any, rounding: Rounding) -> Any:
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made.rounding = rounding
        return made

    def masters(self) -> Iterable[nn.Parameter]:
        return [
            part for name, part in self._parameters.items() if part is not None and name.startswith("weight")
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        clipping.watch(self)  # for copies

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.rounding}"  # type: ignore[no-untyped-call,unused-ignore]


class FewBitLinear(FewBitLayer, nn.Linear):
    """Dense layer of x (..., c)."""

    def forward(self, x: Tensor) -> Tensor:
        rounding, training = self.rounding, self.training
        rounding.begin(training, x)
        with torch.autocast(x.device.type, enabled=False):
            levels = rounding.activation(x.to(self.weight.dtype), training)
            y = rounding.rescale(F.linear(levels, rounding.weight(self.weight)))
            return rounding.round_gradient(y if self.bias is None else y + self.bias, training)


class FewBitConv2d(FewBitLayer, nn.Conv2d):
    """Convolution of x (n, c, h, w), padded with zeros."""

    @classmethod
    def of(cls, layer: nn.Conv2d, rounding: Rounding) -> FewBitConv2d:
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise AttachError(
                f"padding of a few-bit convolution must be a number of zeros, got padding={layer.padding!r},"
                f" padding_mode={layer.padding_mode!r}: pad in a layer before it, such as nn.ReflectionPad2d"
            )
        made: FewBitConv2d = super().of(layer, rounding)
        return made

    def forward(self, x: Tensor) -> Tensor:
        rounding, training = self.rounding, self.training
        rounding.begin(training, x)
        with torch.autocast(x.device.type, enabled=False):
            levels = rounding.activation(x.to(self.weight.dtype), training)
            shape: Any = (self.stride, self.padding, self.dilation, self.groups)
            y = rounding.rescale(F.conv2d(levels, rounding.weight(self.weight), None, *shape))
            return rounding.round_gradient(y if self.bias is None else y + self.bias.view(-1, 1, 1), training)
