"""Layers with few-bit weights and inputs, and float32 master weights.

    y = Q(w) Q(x) + b;  dx = Q(w)^T Q(dy) where |x| <= 1;  dw = Q(dy) Q(x)^T where |w| <= 1

Hubara et al. 2016, arXiv:1609.07061; with one bit a binarised layer, Courbariaux et al. 2016,
arXiv:1602.02830. Q is defined in `levels`. Products of levels are integers, exact in float32 below 2^24 in
any order of summation, so a packed layer has the same bits. For the same reason the bias is added after the
product. Padding counts as 0, which is not a level. All compute in the dtype of their weight, also under
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


class _FewBits(TransformedLayer):
    """Base with `rounding` and clipped master weights."""

    state: ClassVar[str] = "has few bits already"
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


class FewBitLinear(_FewBits, nn.Linear):
    """A dense layer of x (..., c). Made by `binarise` and `quantise`."""

    def forward(self, x: Tensor) -> Tensor:
        rounding, training = self.rounding, self.training
        rounding.begin(training, x)
        with torch.autocast(x.device.type, enabled=False):
            levels = rounding.activation(x.to(self.weight.dtype), training)
            y = rounding.rescale(F.linear(levels, rounding.weight(self.weight)))
            return rounding.round_gradient(y if self.bias is None else y + self.bias, training)


class FewBitConv2d(_FewBits, nn.Conv2d):
    """A convolution of x (n, c, h, w), padded with zeros. Made by `binarise` and `quantise`."""

    @classmethod
    def of(cls, layer: nn.Conv2d, rounding: Rounding) -> FewBitConv2d:
        """Return the few-bit form of a layer. Raise `AttachError` for unsupported padding."""
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


class _FewBitCell(_FewBits):
    """Base of cells, with the products of input and state."""

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        rounding, training = self.rounding, self.training
        rounding.begin(training, x, h)
        found = []
        with torch.autocast(x.device.type, enabled=False):
            for place, side in ((x, "ih"), (h, "hh")):
                weight, bias = getattr(self, f"weight_{side}"), getattr(self, f"bias_{side}")
                levels = rounding.activation(place.to(weight.dtype), training, side)
                y = rounding.rescale(F.linear(levels, rounding.weight(weight)))
                found.append(y if bias is None else y + bias)
        return found[0], found[1]


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next h and c of `nn.LSTMCell`, from its four gates (b, 4 n) and c (b, n)."""
    i, f, g, o = gates.chunk(4, -1)
    after = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after


def gru(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    """Return the next h of `nn.GRUCell`, from both products (b, 3 n)."""
    (r, z, n), (s, t, m) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    update = (z + t).sigmoid()
    new = (n + (r + s).sigmoid() * m).tanh()
    return (1 - update) * new + update * h


class FewBitLSTMCell(_FewBitCell, nn.LSTMCell):
    """An LSTM step of x (b, c) or (c,) and both states, which stay float32."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        of_x, of_h = self.gates(input, hx[0])
        return lstm(self.rounding.round_gradient(of_x + of_h, self.training), hx[1])


class FewBitGRUCell(_FewBitCell, nn.GRUCell):
    """A GRU step of x (b, c) or (c,) and its state, which stays float32."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if hx is None:
            hx = input.new_zeros(*input.shape[:-1], self.hidden_size)
        of_x, of_h = self.gates(input, hx)
        back, training = self.rounding.round_gradient, self.training
        return gru(back(of_x, training), back(of_h, training, "gradient_hh"), hx)


KINDS: dict[type, Any] = {
    nn.Linear: FewBitLinear,
    nn.Conv2d: FewBitConv2d,
    nn.LSTMCell: FewBitLSTMCell,
    nn.GRUCell: FewBitGRUCell,
}
"""Few-bit form of each kind of layer."""

FEW_BIT_LAYERS = (FewBitConv2d, FewBitGRUCell, FewBitLinear, FewBitLSTMCell)
"""All few-bit layers."""
