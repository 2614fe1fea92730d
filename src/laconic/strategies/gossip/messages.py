"""What travels between gossiping ranks: a copy of the parameters, led by the PushSum weight where it may vary.

    message of float32 parameters, weight 1     x, n * 4 bytes: the parameters themselves, sent in place
    otherwise                                   [weight float64 | x float32, float16 or bfloat16]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core import arguments

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
