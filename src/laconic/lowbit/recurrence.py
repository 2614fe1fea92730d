"""LSTM and GRU steps, and runs over sequences like nn.LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from laconic.core.errors import AttachError

State = tuple[Tensor, ...]  # h, and c of an LSTM
Product = Callable[[Tensor, int], Tensor]  # (h (b, n), step) -> W h + b
Back = Callable[
    [Tensor, str, int], Tensor
]  # (product, "ih" or "hh", step) -> product; may round its gradient


class Recurrent(Protocol):
    hidden_size: int
    num_layers: int
    bidirectional: bool
    batch_first: bool
    dropout: float
    training: bool
    states: int  # 2 for an LSTM, 1 for a GRU

    def direction(self, place: str, x: Tensor, state: State, active: Tensor | None) -> tuple[Tensor, State]:
        """Run one direction, such as "l0_reverse": outputs (t, b, n) and last state.

        x: (t, b, c). `state`: (b, n). `active`: bool (t, b, 1), steps inside the sequences, or None.
        """
        ...


def refuse_projections(layer: nn.LSTM | nn.GRU) -> None:
    if layer.proj_size:
        raise AttachError(
            f"an LSTM with projections has no form in few bits, got proj_size={layer.proj_size}: build it"
            " with proj_size=0, or name it in keep="
        )


def run(layer: Recurrent, x: Any, hx: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Run nn.LSTM or nn.GRU on x: (t, b, c), (b, t, c) with `batch_first`, (t, c), or a PackedSequence."""
    packed, active, alone = None, None, False
    if isinstance(x, PackedSequence):
        packed = x
        x, lengths = pad_packed_sequence(packed)
        times = torch.arange(len(x), dtype=torch.int64, device="cpu")
        active = (times[:, None, None] < lengths[:, None]).to(x.device)
    elif alone := x.dim() == 2:
        x = x[:, None]
    elif layer.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if layer.bidirectional else 1
    shape = (layer.num_layers * directions, x.shape[1], layer.hidden_size)
    x = x.to(dtype).contiguous()  # strides may change a product's last bit
    if hx is None:
        first: State = (x.new_zeros(shape),) * layer.states
    else:
        first = tuple(each[:, None] if alone else each for each in (hx if layer.states == 2 else (hx,)))
    if len(first) != layer.states or any(each.shape != shape for each in first):
        raise ValueError(
            f"the state must have the shape {shape}, got {[tuple(each.shape) for each in first]}"
        )
    last = []
    for i in range(layer.num_layers):
        if i:
            x = F.dropout(x, layer.dropout, layer.training)
        outputs = []
        for j in range(directions):
            state = tuple(each[i * directions + j].to(dtype) for each in first)
            out, state = layer.direction(f"l{i}{'_reverse' * j}", x, state, active)
            outputs.append(out)
            last.append(state)
        x = torch.cat(outputs, -1)
    after = tuple(torch.stack(each) for each in zip(*last, strict=True))
    if packed is not None:
        x = pack_padded_sequence(x, lengths, enforce_sorted=packed.sorted_indices is None)
    elif alone:
        x, after = x[:, 0], tuple(each[:, 0] for each in after)
    elif layer.batch_first:
        x = x.transpose(0, 1)
    return x, after if layer.states == 2 else after[0]


def unroll(
    of_x: Tensor, of_h: Product, state: State, active: Tensor | None, reverse: bool, back: Back
) -> tuple[Tensor, State]:
    """Run an LSTM (two states) or a GRU on its inputs' products (t, b, gates)."""
    times, outputs = range(len(of_x)), [*of_x]
    for t in reversed(times) if reverse else times:
        h = state[0]
        after: State
        if len(state) == 2:
            after = lstm(back(of_x[t] + of_h(h, t), "ih", t), state[1])
        else:
            after = (gru(back(of_x[t], "ih", t), back(of_h(h, t), "hh", t), h),)
        if active is not None:
            after = tuple(torch.where(active[t], new, old) for new, old in zip(after, state, strict=True))
        state, outputs[t] = after, after[0]
    return torch.stack(outputs), state


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    after = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after


def gru(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    (r, z, n), (s, t, m) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    update = (z + t).sigmoid()
    new = (n + (r + s).sigmoid() * m).tanh()
    return (1 - update) * new + update * h
