"""Messages between a worker and a server.

Four int64, [kind, bytes of the body, number, version], and a body: [bytes of JSON, int64][JSON, padded to 8
bytes with spaces][bytes of tensors]. `number`: the worker's optimiser; in an answer, the staleness.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import WireError
from laconic.core.framing import as_numbers, read_bytes

MAX_BYTES = 1 << 40


class MessageKind(IntEnum):
    OPEN = 1
    PUSH = 2
    PULL = 3
    BYE = 4
    APPLIED = 5
    REFUSED = 6
    ERROR = 7


@dataclass(frozen=True)
class Message:
    kind: MessageKind
    number: int = 0
    version: int = 0
    body: Any = None
    tensors: Tensor | None = None


def send(comm: Comm, peer: int, call: Message) -> None:
    text = json.dumps(call.body).encode()
    text += b" " * (-len(text) % 8)
    tensors = torch.empty(0, dtype=torch.uint8, device="cpu") if call.tensors is None else call.tensors
    head = torch.tensor([len(text)], dtype=torch.int64, device="cpu").view(torch.uint8)
    body = torch.cat([head, torch.frombuffer(bytearray(text), dtype=torch.uint8), tensors])
    comm.exchange(
        {
            peer: torch.tensor(
                [int(call.kind), body.numel(), call.number, call.version], dtype=torch.int64, device="cpu"
            )
        },
        {},
    )
    comm.exchange({peer: body}, {})


def receive(comm: Comm, peer: int) -> Message:
    header = torch.zeros(4, dtype=torch.int64, device="cpu")
    comm.exchange({}, {peer: header})
    kind, nbytes, number, version = header.tolist()
    if kind not in {*MessageKind} or not 8 <= nbytes <= MAX_BYTES:
        raise WireError(f"a message must begin with [kind, bytes, number, version], got {header.tolist()}")
    body = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    comm.exchange({}, {peer: body})
    head, rest = read_bytes(body, 8, "the length of the text")
    text, tensors = read_bytes(rest, max(0, int(as_numbers(head, torch.int64))), "the text")
    try:
        config = json.loads(bytes(text.tolist()))
    except ValueError as error:
        raise WireError(f"the text of a message is not JSON: {error}") from error
    return Message(MessageKind(kind), number, version, config, tensors)
