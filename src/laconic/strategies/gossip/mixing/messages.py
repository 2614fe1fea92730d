"""Messages of gossip: the parameters, after the PushSum weight if it may vary.

float32 parameters, weight 1     x, n * 4 bytes: the parameters themselves, sent in place
otherwise                        [weight float64 | x float32, float16 or bfloat16]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.strategies.gossip.mixing import Weights

WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEAD = 8


def check_wire(wire: str) -> None:
    arguments.choice("wire", wire, tuple(WIRES))


class ParameterMessage:
    """Weight and n parameters in one buffer, `packed` uint8 (8 + n * item size,)."""

    def __init__(self, like: Tensor, wire: str, device: torch.device | None = None) -> None:
        dtype, device = WIRES[wire], device or like.device
        self.packed = torch.empty(HEAD + like.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
        self.weight_cell = self.packed[:HEAD].view(torch.float64)
        self.x = self.packed[HEAD:].view(dtype)

    def write(self, x: Tensor, weight: float) -> None:
        if self.x.dtype != x.dtype:
            most = torch.finfo(self.x.dtype).max
            x = torch.where(x.isinf(), x, x.clamp(-most, most))
        self.x.copy_(x)
        self.weight_cell.fill_(weight)

    @property
    def weight(self) -> float:
        return float(self.weight_cell)


class MessageBuffers:
    def __init__(self, like: Tensor, wire: str) -> None:
        self._like, self._wire = like, wire
        self._messages: list[ParameterMessage] = []

    @property
    def count(self) -> int:
        return len(self._messages)

    @property
    def sent(self) -> ParameterMessage:
        return self._at(0)

    def coming(self, shares: Weights) -> dict[int, ParameterMessage]:
        return {rank: self._at(1 + place) for place, rank in enumerate(sorted(shares.into))}

    def _at(self, place: int) -> ParameterMessage:
        while place >= len(self._messages):
            self._messages.append(ParameterMessage(self._like, self._wire))
        return self._messages[place]


def mix_(x: Tensor, own: float, came: Mapping[int, Tensor], shares: Mapping[int, float]) -> Tensor:
    if all(share == own for share in shares.values()):
        for rank in sorted(came):
            x.add_(came[rank])
        return x.mul_(own)
    x.mul_(own)
    for rank in sorted(came):
        x.add_(came[rank], alpha=shares[rank])
    return x


def subtract_sent_(x: Tensor, weight: Tensor, sent: ParameterMessage, shares: Weights) -> None:
    """Subtract the sent shares: this rank keeps the wire type's rounding error."""
    away = sum(shares.out.values())
    x.sub_(sent.x, alpha=away)
    weight.mul_(1.0 - away)


def add_received_(x: Tensor, weight: Tensor, buffers: MessageBuffers, shares: Weights) -> None:
    for rank, message in buffers.coming(shares).items():
        x.add_(message.x, alpha=shares.into[rank])
        weight.add_(message.weight * shares.into[rank])


def scale_(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x.mul_(factor)
