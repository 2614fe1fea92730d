"""Offer: a header before a link's tensor.

    [magic u32 | state u16 | gradient u16 | body bytes u64 | digest u64]   24 bytes

The answer has the same form.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from laconic.core.errors import WireError

HEADER = struct.Struct("<IHHQQ")
MAGIC = 0x314F4C4C


class State(IntEnum):
    """OFFERED: a tensor is ready, or accepted. FAILED: it cannot be sent. REFUSED: it is not expected."""

    OFFERED = 0
    FAILED = 1
    REFUSED = 2


@dataclass(frozen=True)
class Offer:
    """Header. `gradient`: whether this end wants one; `agreed`: digest."""

    state: State
    gradient: bool = False
    nbytes: int = 0
    agreed: int = 0

    def message(self, device: torch.device) -> Tensor:
        head = HEADER.pack(MAGIC, self.state, self.gradient, self.nbytes, self.agreed)
        return torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)

    @classmethod
    def of(cls, message: Tensor) -> Offer:
        """Parse a message uint8 (24,). Raises `WireError`.

        >>> Offer.of(Offer(State.OFFERED, True, 9, 7).message(torch.device("cpu"))).nbytes
        9
        """
        magic, state, gradient, nbytes, agreed = HEADER.unpack(bytes(message.tolist()))
        if magic != MAGIC or state not in [*State]:
            raise WireError("this is not an offer of a link: match send and receive in order on both ranks")
        return cls(State(state), bool(gradient), nbytes, agreed)
