"""All-gather of text and numbers."""

from __future__ import annotations

import json
from typing import Any

import torch

from laconic.comm.comm import Comm


def gather_text(comm: Comm, text: str) -> list[str]:
    """Return the text of every rank. Call it on all ranks.

    >>> from laconic.comm.loopback import Loopback
    >>> Loopback.run(2, lambda comm: gather_text(comm, "ab"[: comm.rank]))
    [['', 'a'], ['', 'a']]
    """
    wire = torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")
    return [bytes(each.tolist()).decode() for each in comm.all_gather(wire)]


def gather_numbers(comm: Comm, *numbers: int) -> list[tuple[int, ...]]:
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return [tuple(each.tolist()) for each in comm.all_gather(own)]


def gather_json(comm: Comm, value: Any) -> list[Any]:
    return [json.loads(text) for text in gather_text(comm, json.dumps(value))]
