"""A message between stages: a header that tells whether the two sides agree, and the coded tensor.

    [magic u32 | state u32 | body bytes u64 | digest u64]   24 bytes, then the body

The digest is of all that both sides must have alike for the body to be understood: step, micro-batch, sample
ids, which of them come for the first time, the version of the buffer, shapes. A rank that has failed sends
headers alone, with `FAILED`, until the step has ended: nobody waits for a message that does not come, and
nobody decodes rubbish.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.pipeline.buffer import WAY_OUT

HEADER = struct.Struct("<IIQQ")
MAGIC = 0x31504C4C  # "LLP1"
SENT, FAILED = 0, 1


class PeerFailed(Exception):
    """The sender has failed, and will say so at the end of the step."""


def digest(*parts: bytes | str) -> int:
    """64 bits of these parts, equal in every process."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(hashed.digest(), "little")


def sealed(body: Tensor | None, agreed: int, device: torch.device, room: int | None = None) -> Tensor:
    """A message uint8 (m,) on this device; without a body, that of a rank that has failed.

    `room`: its exact length, for backends on which both sides must name the same one; the rest is zero.
    """
    size = 0 if body is None else body.numel()
    head = HEADER.pack(MAGIC, FAILED if body is None else SENT, size, agreed)
    message = torch.zeros(HEADER.size + size if room is None else room, dtype=torch.uint8, device=device)
    message[: HEADER.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if body is not None:
        message[HEADER.size : HEADER.size + size] = body
    return message


def opened(message: Tensor, agreed: int) -> Tensor:
    """The body of a message, a view.

    Raises:
        PeerFailed: The sender has failed.
        WireError: It is no such message, or the sides disagree.
    """
    magic, state, size, other = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
    if magic != MAGIC or state not in (SENT, FAILED):
        raise WireError(
            "this is no message of a compressed stage: call laconic.pipeline.compress on all ranks"
        )
    if state == FAILED:
        raise PeerFailed
    if other != agreed:
        raise WireError(
            "the two sides disagree about the step, the sample ids, what they remember of samples, or shapes:"
            " give all ranks the same ids in the same order, and load all ranks' states of one checkpoint;"
            f" {WAY_OUT}"
        )
    if size > message.numel() - HEADER.size:
        raise WireError(f"a body of {size} bytes is announced, but {message.numel() - HEADER.size} have room")
    return message[HEADER.size : HEADER.size + size]


def length(message: Tensor) -> int:
    """The bytes of a message that lies at the start of a longer buffer, by its header."""
    size: int = HEADER.unpack(bytes(message[: HEADER.size].tolist()))[2]
    return HEADER.size + size
