"""Agreement of all ranks before they attach or load something: one failure raises on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_json, gather_text
from laconic.comm.waiting import ATTACHING, log_if_slow
from laconic.core.errors import AttachError, StateError

QUOTES = " says: "  # the launcher then waits for rank 1's own message

Fingerprint = Mapping[str, str]


class Attachable(Protocol):
    @property
    def fingerprint(self) -> Fingerprint:
        """Settings that must be equal on all ranks."""

    def remove(self) -> None:
        """Detach."""


T = TypeVar("T", bound=Attachable)


def built_by_all(comm: Comm, build: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return the result of `build`, if every rank builds the same.

    Raises `AttachError` on every rank, with nothing attached, if the ranks differ or `build` failed on one.
    `undo` removes it on this rank alone, by default its `remove`.
    """
    built: list[T] = []

    def describe() -> Fingerprint:
        built.append(build())
        return built[0].fingerprint

    try:
        agree(comm, describe)
    except BaseException:
        for each in built:
            (each.remove if undo is None else partial(undo, each))()
        raise
    return built[0]


def agree(comm: Comm, describe: Callable[[], Fingerprint]) -> Fingerprint:
    """Return the fingerprint from `describe`.

    Raises `AttachError` on every rank if fingerprints differ or `describe` failed on one.
    """
    mine: Fingerprint = {}
    error: Exception | None = None
    try:
        mine = describe()
    except Exception as failed:
        error = failed
    said = {"error": None if error is None else str(error), "fingerprint": dict(mine)}
    with log_if_slow(comm.rank, ATTACHING):
        others = gather_json(comm, said)
    if error is not None:
        raise error
    for rank, other in enumerate(others):
        if other["error"] is not None:
            raise AttachError(f"nothing was attached: rank {rank}{QUOTES}{other['error']}")
    for key, value in mine.items():
        for rank, other in enumerate(others):
            if other["fingerprint"].get(key) != value:
                raise AttachError(
                    f"nothing was attached: {key} differs: rank {comm.rank} has {value},"
                    f" rank {rank} has {other['fingerprint'].get(key)}; all ranks must make the same call"
                )
    return mine


def accepted_by_all(comm: Comm, check: Callable[[], object]) -> None:
    """Check a state before loading; if one rank refuses, raise `StateError` on every rank."""
    refused: StateError | None = None
    try:
        check()
    except StateError as error:
        refused = error
    with log_if_slow(comm.rank, "load_state_dict"):
        texts = gather_text(comm, str(refused or ""))
    if refused is not None:
        raise refused
    for rank, text in enumerate(texts):
        if text:
            raise StateError(f"nothing was loaded: rank {rank}{QUOTES}{text}")
