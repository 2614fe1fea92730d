"""What travels between gossiping ranks: the parameters, led by the PushSum weight where it may vary.

message of float32 parameters, weight 1     x, n * 4 bytes: the parameters themselves, sent in place
otherwise                                   [weight float64 | x float32, float16 or bfloat16]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.strategies.gossip.mixing import Weights

WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEAD = 8  # bytes of the weight


def check_wire(wire: str) -> None:
    """Raise `SpecError` unless parameters can travel in this type."""
    arguments.choice("wire", wire, tuple(WIRES))


class Message:
    """A weight and n parameters in one buffer, `packed` uint8 (8 + n * item size,)."""

    def __init__(self, like: Tensor, wire: str) -> None:
        dtype = WIRES[wire]
        self.packed = torch.empty(HEAD + like.numel() * dtype.itemsize, dtype=torch.uint8, device=like.device)
        self.weight_cell = self.packed[:HEAD].view(torch.float64)
        self.x = self.packed[HEAD:].view(dtype)

    def write(self, x: Tensor, weight: float) -> None:
        """Take a copy of float32 x (n,) and its weight."""
        self.x.copy_(x)
        self.weight_cell.fill_(weight)

    @property
    def weight(self) -> float:
        """The sender's weight."""
        return float(self.weight_cell)


class Mail:
    """A message a rank, made when first asked for: those of others come in, this rank's own goes out."""

    def __init__(self, like: Tensor, wire: str) -> None:
        self._like, self._wire = like, wire
        self._messages: dict[int, Message] = {}

    def __getitem__(self, rank: int) -> Message:
        if rank not in self._messages:
            self._messages[rank] = Message(self._like, self._wire)
        return self._messages[rank]


def mix_(x: Tensor, own: float, came: Mapping[int, Tensor], shares: Mapping[int, float]) -> Tensor:
    """x = own * x + sum of shares[i] * came[i] in rank order, in place; equal shares are multiplied once."""
    if all(share == own for share in shares.values()):
        for rank in sorted(came):
            x.add_(came[rank])
        return x.mul_(own)
    x.mul_(own)
    for rank in sorted(came):
        x.add_(came[rank], alpha=shares[rank])
    return x


def give_(x: Tensor, weight: Tensor, sent: Message, shares: Weights) -> None:
    """Take out of x and its weight what `sent` carries to the out-peers: the sum of all is as before.

    What rounding to the wire's type leaves stays here.
    """
    away = sum(shares.out.values())
    x.sub_(sent.x, alpha=away)
    weight.mul_(1.0 - away)


def take_(x: Tensor, weight: Tensor, mail: Mail, shares: Weights) -> None:
    """Add what has come from the in-peers, in rank order."""
    for rank in sorted(shares.into):
        x.add_(mail[rank].x, alpha=shares.into[rank])
        weight.add_(mail[rank].weight * shares.into[rank])


def times_(x: Tensor, factor: float) -> Tensor:
    """x *= factor, in place; 1 costs nothing."""
    return x if factor == 1.0 else x.mul_(factor)
