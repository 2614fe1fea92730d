"""Recurrent inference layers with packed weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.lowbit.few_bits import FewBits
from laconic.lowbit.packed_layers import Packed, linear
from laconic.lowbit.recurrence import State, gru, lstm, refuse_projections, run, unroll


class _PackedCell(Packed):
    """`bits_ih` and `bits_hh`: uint8 (planes, gates, ceil(c / 8))."""

    def __init__(self, layer: Any, levels: FewBits) -> None:
        super().__init__(levels, max(layer.input_size, layer.hidden_size))
        self.hidden_size = layer.hidden_size
        for side in ("ih", "hh"):
            weight, bias = getattr(layer, f"weight_{side}"), getattr(layer, f"bias_{side}")
            self.add_bits_buffer(f"bits_{side}", (len(weight),), weight, weight.shape[1])
            self.add_bias_buffer(f"bias_{side}", bias)

    @classmethod
    def of(cls, layer: Any) -> Any:
        made = cls(layer, layer.rounding.bits)
        for side in ("ih", "hh"):
            made.pack_weight(f"bits_{side}", getattr(layer, f"weight_{side}"))
        return made

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for side, given in (("ih", x), ("hh", h)):
            y, bias = linear(self, f"bits_{side}", given.float()), getattr(self, f"bias_{side}")
            found.append(y if bias is None else y + bias)
        return found[0], found[1]


class PackedLSTMCell(_PackedCell):
    """Packed `FewBitLSTMCell`."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if hx is None:
            zeros = x.new_zeros(*x.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        of_x, of_h = self.gates(x, hx[0])
        return lstm(of_x + of_h, hx[1])


class PackedGRUCell(_PackedCell):
    """Packed `FewBitGRUCell`."""

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        if hx is None:
            hx = x.new_zeros(*x.shape[:-1], self.hidden_size)
        return gru(*self.gates(x, hx), hx)


class _PackedSequences(Packed):
    states: ClassVar[int]

    def __init__(self, layer: nn.LSTM | nn.GRU, levels: FewBits) -> None:
        refuse_projections(layer)
        weights = {key: part for key, part in layer._parameters.items() if part is not None}
        super().__init__(levels, max(part.shape[-1] for part in weights.values() if part.dim() > 1))
        self.hidden_size, self.num_layers = layer.hidden_size, layer.num_layers
        self.bidirectional, self.batch_first = layer.bidirectional, layer.batch_first
        self.dropout = layer.dropout
        for key, part in weights.items():
            if key.startswith("weight"):
                self.add_bits_buffer(key.replace("weight", "bits"), (len(part),), part, part.shape[1])
            else:
                self.add_bias_buffer(key, part)

    @classmethod
    def of(cls, layer: Any) -> Any:
        made = cls(layer, layer.rounding.bits)
        for key in made.packs:
            made.pack_weight(key, getattr(layer, key.replace("bits", "weight")))
        return made

    def forward(self, x: Any, hx: Any = None) -> Any:
        layer: Any = self
        return run(layer, x, hx, torch.float32)

    def direction(self, place: str, x: Tensor, state: State, active: Tensor | None) -> tuple[Tensor, State]:
        def product(side: str, given: Tensor) -> Tensor:
            y, bias = linear(self, f"bits_{side}_{place}", given), self._buffers.get(f"bias_{side}_{place}")
            return y if bias is None else y + bias

        def of_h(h: Tensor, t: int) -> Tensor:
            return product("hh", h)

        def back(found: Tensor, side: str, t: int) -> Tensor:
            return found

        return unroll(product("ih", x), of_h, state, active, place.endswith("_reverse"), back)


class PackedLSTM(_PackedSequences):
    """Packed `FewBitLSTM`."""

    states = 2


class PackedGRU(_PackedSequences):
    """Packed `FewBitGRU`."""

    states = 1
