"""Layers that compute with a few levels of their weights and inputs, and keep float32 master weights.

    y = Q(w) Q(x) + b;  dx = Q(w)^T Q(dy) where |x| <= 1;  dw = Q(dy) Q(x)^T where |w| <= 1

Hubara et al. 2016, arXiv:1609.07061; one bit is a binarised layer, of Courbariaux et al. 2016,
arXiv:1602.02830. Q is in `levels`. A product of levels is one of whole numbers, which float32 has exactly
below 2^24, whatever the order of the sum: so a packed layer has the same bits. The bias is added to that
product, not within it, for the same reason. Padding counts as 0, which is no level. All compute in the dtype
of their weight, under autocast too.
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
        """The layer in few bits, with the same parameters."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made.rounding = rounding
        return made

    def masters(self) -> Iterable[nn.Parameter]:
        """The weights that have few bits in a product."""
        return [
            part for name, part in self._parameters.items() if part is not None and name.startswith("weight")
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        clipping.watch(self)  # of a copy too

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.rounding}"  # type: ignore[no-untyped-call,unused-ignore]


class FewBitLinear(_FewBits, nn.Linear):
    """A dense layer of x (..., c). Made by `binarise` and `quantise`."""

    def forward(self, x: Tensor) -> Tensor:
        rounding, training = self.rounding, self.training
        rounding.begin(training, x)
        with torch.autocast(x.device.type, enabled=False):
            levels = rounding.activation(x.to(self.weight.dtype), training)
            y = rounding.scaled(F.linear(levels, rounding.weight(self.weight)))
            return rounding.back(y if self.bias is None else y + self.bias, training)


class FewBitConv2d(_FewBits, nn.Conv2d):
    """A convolution of x (n, c, h, w), padded with zeros. Made by `binarise` and `quantise`."""

    @classmethod
    def of(cls, layer: nn.Conv2d, rounding: Rounding) -> FewBitConv2d:
        """The layer in few bits. Raises `AttachError` for other paddings."""
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise AttachError(
                f"a convolution in few bits pads with a number of zeros, got padding={layer.padding!r},"
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
            y = rounding.scaled(F.conv2d(levels, rounding.weight(self.weight), None, *shape))
            return rounding.back(y if self.bias is None else y + self.bias.view(-1, 1, 1), training)


class _FewBitCell(_FewBits):
    """A cell's two products: of its input, and of its state."""

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """W_ih x + b_ih and W_hh h + b_hh."""
        rounding, training = self.rounding, self.training
        rounding.begin(training, x, h)
        found = []
        with torch.autocast(x.device.type, enabled=False):
            for place, side in ((x, "ih"), (h, "hh")):
                weight, bias = getattr(self, f"weight_{side}"), getattr(self, f"bias_{side}")
                levels = rounding.activation(place.to(weight.dtype), training, side)
                y = rounding.scaled(F.linear(levels, rounding.weight(weight)))
                found.append(y if bias is None else y + bias)
        return found[0], found[1]


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The next h and c of an LSTM, from its four gates (b, 4 n) and c (b, n), as `nn.LSTMCell` has them."""
    i, f, g, o = gates.chunk(4, -1)
    after = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after


def gru(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    """The next h of a GRU, from both products (b, 3 n), as `nn.GRUCell` has it."""
    (r, z, n), (s, t, m) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    update = (z + t).sigmoid()
    new = (n + (r + s).sigmoid() * m).tanh()
    return (1 - update) * new + update * h


class FewBitLSTMCell(_FewBitCell, nn.LSTMCell):
    """An LSTM's step, x (b, c) or (c,) and both states. The states themselves stay float32."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        of_x, of_h = self.gates(input, hx[0])
        return lstm(self.rounding.back(of_x + of_h, self.training), hx[1])


class FewBitGRUCell(_FewBitCell, nn.GRUCell):
    """A GRU's step, x (b, c) or (c,) and its state. The state itself stays float32."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if hx is None:
            hx = input.new_zeros(*input.shape[:-1], self.hidden_size)
        of_x, of_h = self.gates(input, hx)
        back, training = self.rounding.back, self.training
        return gru(back(of_x, training), back(of_h, training, "gradient_hh"), hx)


KINDS: dict[type, Any] = {
    nn.Linear: FewBitLinear,
    nn.Conv2d: FewBitConv2d,
    nn.LSTMCell: FewBitLSTMCell,
    nn.GRUCell: FewBitGRUCell,
}
"""The form in few bits of each kind of layer."""

FEW = (FewBitConv2d, FewBitGRUCell, FewBitLinear, FewBitLSTMCell)
"""All layers with few bits."""
