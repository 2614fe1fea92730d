"""All ranks attach the same thing, or none does.

Each rank sends a fingerprint of what it is about to attach, or the error that stops it. If the fingerprints
differ, or one rank has an error, every rank raises: nobody waits in a collective for a rank that gave up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

from laconic.comm.comm import Comm
from laconic.comm.waiting import ATTACHING, log_if_slow
from laconic.core.errors import AttachError, StateError

QUOTES = " says: "  # as in "rank 1 says: no such layer": the launcher then waits for what rank 1 tells

Fingerprint = Mapping[str, str]  # what is compared -> its value, in words that an error can show


class Attachable(Protocol):
    """What ranks attach together."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What all ranks must have alike."""

    def remove(self) -> None:
        """Leave nothing behind."""


T = TypeVar("T", bound=Attachable)


def built_by_all(comm: Comm, build: Callable[[], T]) -> T:
    """What `build` makes on this rank, if every rank makes the same.

    Raises:
        AttachError: On every rank, with nothing left behind, if the ranks differ or `build` failed on one.
    """
    try:
        built = build()
    except Exception as error:
        agree(comm, None, error)
        raise
    try:
        agree(comm, built.fingerprint)
    except BaseException:
        built.remove()
        raise
    return built


def agree(comm: Comm, mine: Fingerprint | None, error: Exception | None = None) -> None:
    """Raise `error`, or `AttachError`, on every rank unless all have the same fingerprint and no error."""
    text = json.dumps({"error": None if error is None else str(error), "fingerprint": dict(mine or {})})
    with log_if_slow(comm.rank, ATTACHING):
        texts = comm.all_gather(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    if error is not None:
        raise error
    others = [json.loads(bytes(each.tolist())) for each in texts]
    for rank, other in enumerate(others):
        if other["error"] is not None:
            raise AttachError(f"nothing was attached: rank {rank}{QUOTES}{other['error']}")
    for key, value in (mine or {}).items():
        for rank, other in enumerate(others):
            if other["fingerprint"].get(key) != value:
                raise AttachError(
                    f"nothing was attached: {key} differs: rank {comm.rank} has {value},"
                    f" rank {rank} has {other['fingerprint'].get(key)}; all ranks must make the same call"
                )


def accepted_by_all(comm: Comm, check: Callable[[], object]) -> None:
    """Check a state that every rank is about to load; if one refuses, raise `StateError` on every rank."""
    refused: StateError | None = None
    try:
        check()
    except StateError as error:
        refused = error
    with log_if_slow(comm.rank, "load_state_dict"):
        texts = comm.all_gather(torch.frombuffer(bytearray(f" {refused or ''}".encode()), dtype=torch.uint8))
    if refused is not None:
        raise refused
    for rank, text in enumerate(texts):
        if said := bytes(text.tolist()).decode().strip():
            raise StateError(f"nothing was loaded: rank {rank}{QUOTES}{said}")
