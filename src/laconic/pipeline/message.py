"""Message between stages: a header and the coded tensor.

    [magic u32 | state u32 | body bytes u64 | digest u64]   24 bytes, then the body

The digest covers everything needed to decode the body: step, micro-batch, sample ids, the buffer's version,
shapes. A failed rank sends `FAILED` headers until the step ends, so that no rank waits.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.pipeline.buffer import WAY_OUT

HEADER = struct.Struct("<IIQQ")
MAGIC = 0x31504C4C
SENT, FAILED = 0, 1


class PeerFailed(Exception):
    """Failure of the sender, which reports it at the step's end."""


def digest(*parts: bytes | str) -> int:
    """Return a 64-bit digest, equal in every process."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(hashed.digest(), "little")


def sealed(body: Tensor | None, agreed: int, device: torch.device, room: int | None = None) -> Tensor:
    """Return a message uint8 (m,), padded to `room`; without a body, that of a failed rank."""
    size = 0 if body is None else body.numel()
    head = HEADER.pack(MAGIC, FAILED if body is None else SENT, size, agreed)
    message = torch.zeros(HEADER.size + size if room is None else room, dtype=torch.uint8, device=device)
    message[: HEADER.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if body is not None:
        message[HEADER.size : HEADER.size + size] = body
    return message


def opened(message: Tensor, agreed: int) -> Tensor:
    """Return the body, a view. Raises `PeerFailed` if the sender has failed, `WireError` on disagreement."""
    magic, state, size, other = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
    if magic != MAGIC or state not in (SENT, FAILED):
        raise WireError(
            "this is not a message of a compressed stage: call laconic.pipeline.compress on all ranks"
        )
    if state == FAILED:
        raise PeerFailed
    if other != agreed:
        raise WireError(
            "the two sides disagree about the step, the sample ids, the stored samples, or shapes:"
            " pass the same ids in the same order to all ranks, and load states of one checkpoint;"
            f" {WAY_OUT}"
        )
    if size > message.numel() - HEADER.size:
        raise WireError(
            f"the header announces {size} bytes, but the message has {message.numel() - HEADER.size}"
        )
    return message[HEADER.size : HEADER.size + size]


def length(message: Tensor) -> int:
    size: int = HEADER.unpack(bytes(message[: HEADER.size].tolist()))[2]
    return HEADER.size + size
