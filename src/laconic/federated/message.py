"""Message between a client and the server.

    b"lacn"        4    magic number
    protocol       1    VERSION
    kind           1    see `Kind`
    fingerprint    8    of the model's form: names, shapes, dtypes, and the treatment of buffers
    token          8    drawn by the server for this client's message; the client's answer repeats it
    accepted       8    down: the token of the last answer that the server accepted from this client, or 0; or
                        `too_large` of the last one, if its update was too large
    base           4    down: the version that the client must hold, or 0; up: the one it trained from
    version        4    down: the version that it holds then; up: the same as base
    model          8    `digest` of the compressed tensors of that version
    specs          4 + t   two lengths uint16, then the specs of both directions, up first, as text
    body           8 + m   its length uint64, then the bytes
    checksum       4    CRC-32 of all bytes before it

Numbers are little-endian. Every length is checked before it is used.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from laconic.core.errors import WireError

MAGIC, VERSION = b"lacn", 1
HEAD = struct.Struct("<4sBB8sQQIIQHH")
LENGTH, CHECK = struct.Struct("<Q"), struct.Struct("<I")
LONGEST_SPEC = 2000  # bytes
OVERHEAD = HEAD.size + LENGTH.size + CHECK.size  # bytes without specs and body


class Refused(WireError):
    """Refusal of a message. `reason`: a fixed phrase, for counting."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(f"{reason}: {details}")
        self.reason = reason


class NeedsWhole(Refused):
    """Refusal of an update to a version that the client does not hold."""

    def __init__(self, details: str) -> None:
        super().__init__("needs the whole model", details)


class Kind(IntEnum):
    """Kind of body: model; updates or changed entries since a version; a client's update or version."""

    WHOLE = 0
    UPDATES = 1
    ENTRIES = 2
    ANSWER = 3
    HOLDS = 4


@dataclass(frozen=True)
class Message:
    kind: Kind
    fingerprint: bytes
    token: int
    accepted: int
    base: int
    version: int
    model: int
    up: str
    down: str
    body: Tensor

    def pack(self) -> Tensor:
        up, down = self.up.encode(), self.down.encode()
        head = HEAD.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.fingerprint,
            self.token,
            self.accepted,
            self.base,
            self.version,
            self.model,
            len(up),
            len(down),
        )
        raw = b"".join((head, up, down, LENGTH.pack(self.body.numel()), self.body.numpy().tobytes()))
        return torch.frombuffer(bytearray(raw + CHECK.pack(zlib.crc32(raw))), dtype=torch.uint8)

    @classmethod
    def unpack(cls, wire: Tensor, most: int) -> Message:
        """Read an untrusted message, uint8 (m,), with a body of at most `most` bytes.

        Raises `Refused`: "malformed", "truncated", "oversized" or "other protocol".
        """
        if wire.dtype != torch.uint8 or wire.dim() != 1:
            raise Refused("malformed", f"a vector of bytes is expected, got {wire.dtype} {tuple(wire.shape)}")
        limit = OVERHEAD + 2 * LONGEST_SPEC + most
        if wire.numel() > limit:
            raise Refused("oversized", f"at most {limit} bytes fit this model, got {wire.numel()}")
        raw = memoryview(wire.numpy().tobytes())
        if len(raw) < OVERHEAD:
            raise Refused("truncated", f"a message has {OVERHEAD} bytes or more, got {len(raw)}")
        magic, protocol, kind, *fields, up, down = HEAD.unpack_from(raw)
        if magic != MAGIC:
            raise Refused("malformed", f"it starts with {bytes(magic)!r}, not {MAGIC!r}")
        if protocol != VERSION:
            raise Refused(
                "other protocol",
                f"it has protocol version {protocol}, not {VERSION}: install the same laconic on both sides",
            )
        if kind not in iter(Kind):
            raise Refused("malformed", f"kind {kind} does not exist")
        start = HEAD.size + up + down
        if max(up, down) > LONGEST_SPEC or len(raw) < start + LENGTH.size + CHECK.size:
            raise Refused("truncated", f"specs of {up} and {down} bytes do not fit in {len(raw)} bytes")
        (length,) = LENGTH.unpack_from(raw, start)
        expected = start + LENGTH.size + length + CHECK.size
        if len(raw) != expected:
            raise Refused("truncated", f"{expected} bytes are announced, got {len(raw)}")
        end = expected - CHECK.size
        if zlib.crc32(raw[:end]) != CHECK.unpack_from(raw, end)[0]:
            raise Refused("malformed", "its checksum does not match its bytes")
        try:
            goes_up = str(raw[HEAD.size : HEAD.size + up], "utf-8")
            comes_down = str(raw[HEAD.size + up : start], "utf-8")
        except UnicodeDecodeError as error:
            raise Refused("malformed", f"a spec is not UTF-8 text: {error}") from None
        body = wire[start + LENGTH.size : end].clone()
        fingerprint, token, accepted, base, version, model = fields
        return cls(Kind(kind), fingerprint, token, accepted, base, version, model, goes_up, comes_down, body)


def too_large(token: int) -> int:
    """Return the mark, from an odd token, of an answer whose update was too large.

    The client then drops its residual, else all later answers would be too large.
    """
    return token - 1


def digest(model: Tensor) -> int:
    """Return a 64-bit digest of a model: version numbers may repeat after the server is restored."""
    return int.from_bytes(hashlib.blake2b(model.numpy().tobytes(), digest_size=8).digest(), "little")
