"""All ranks attach the same thing, or none does.

Each rank lays down a fingerprint of what it is about to attach, or the error that stops it. Where they
differ, or one has an error, every rank raises: nobody is left waiting in a collective for a rank that gave
up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError

Fingerprint = Mapping[str, str]  # what is compared -> its value, in words that an error can show


def agree(comm: Comm, mine: Fingerprint | None, error: Exception | None = None) -> None:
    """Raise `error`, or `AttachError`, on every rank unless all have the same fingerprint and no error."""
    told = json.dumps({"error": None if error is None else str(error), "print": dict(mine or {})})
    heard = comm.all_gather(torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8))
    if error is not None:
        raise error
    others = [json.loads(bytes(answer.tolist())) for answer in heard]
    for rank, other in enumerate(others):
        if other["error"] is not None:
            raise AttachError(f"nothing was attached: rank {rank} says: {other['error']}")
    for key, value in (mine or {}).items():
        for rank, other in enumerate(others):
            if other["print"].get(key) != value:
                raise AttachError(
                    f"nothing was attached: {key} differs: rank {comm.rank} has {value},"
                    f" rank {rank} has {other['print'].get(key)}; all ranks must make the same call"
                )
