"""Recurrent layers with few-bit weights, x and h.

    LSTM   gates = Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh;  GRU  both products apart

Hubara et al. 2016, arXiv:1609.07061. Gates and states stay float32. Q: see `few_bit_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from laconic.lowbit.few_bit_layers import FewBitLayer
from laconic.lowbit.few_bits import Rounding
from laconic.lowbit.recurrence import State, gru, lstm, refuse_projections, run, unroll


class _FewBitCell(FewBitLayer):
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


class FewBitLSTMCell(_FewBitCell, nn.LSTMCell):
    """Few-bit nn.LSTMCell."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        of_x, of_h = self.gates(input, hx[0])
        return lstm(self.rounding.round_gradient(of_x + of_h, self.training), hx[1])


class FewBitGRUCell(_FewBitCell, nn.GRUCell):
    """Few-bit nn.GRUCell."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if hx is None:
            hx = input.new_zeros(*input.shape[:-1], self.hidden_size)
        of_x, of_h = self.gates(input, hx)
        back, training = self.rounding.round_gradient, self.training
        return gru(back(of_x, training), back(of_h, training, "gradient_hh"), hx)


class _FewBitSequences(FewBitLayer):
    states: ClassVar[int]

    @classmethod
    def of(cls, layer: Any, rounding: Rounding) -> Any:
        refuse_projections(layer)
        return super().of(layer, rounding)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        given = () if hx is None else hx if self.states == 2 else (hx,)
        values = input.data if isinstance(input, PackedSequence) else input
        self.rounding.begin(self.training, values, *given)
        layer: Any = self
        with torch.autocast(values.device.type, enabled=False):
            return run(layer, input, hx, self._parameters["weight_ih_l0"].dtype)  # type: ignore[union-attr]

    def direction(self, place: str, x: Tensor, state: State, active: Tensor | None) -> tuple[Tensor, State]:
        rounding, training = self.rounding, self.training

        def back(product: Tensor, side: str, t: int) -> Tensor:
            return rounding.round_gradient(product, training, f"gradient_{side}_{place}_{t}")

        of_h = self._product("hh", place)
        reverse = place.endswith("_reverse")
        return unroll(self._product("ih", place)(x), of_h, state, active, reverse, back)

    def _product(self, side: str, place: str) -> Callable[..., Tensor]:
        rounding, training = self.rounding, self.training
        weight = rounding.weight(getattr(self, f"weight_{side}_{place}"))
        bias = self._parameters.get(f"bias_{side}_{place}")

        def product(x: Tensor, t: int = 0) -> Tensor:
            levels = rounding.activation(x, training, f"{side}_{place}_{t}")
            y = rounding.rescale(F.linear(levels, weight))
            return y if bias is None else y + bias

        return product


class FewBitLSTM(_FewBitSequences, nn.LSTM):
    """Few-bit nn.LSTM."""

    states = 2


class FewBitGRU(_FewBitSequences, nn.GRU):
    """Few-bit nn.GRU."""

    states = 1
