"""Deployment: where the replicas of a script run. A `Seat` is what one replica finds there."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import Spec, parse

T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """What a deployment is started with.

    Attributes:
        timeout_s: Seconds that a replica waits for another in one collective.
        checkpoints: Folder of the servers' checkpoints; None: there are none.
        every: Updates from one checkpoint of a server to its next.
    """

    timeout_s: float = 1800.0
    checkpoints: Path | None = None
    every: int = 100


@dataclass
class Seat:
    """One replica's place in a deployment.

    Attributes:
        comm: The replicas in sync with this one; `comm.rank` is this replica's number among them.
        group, groups: Which group of such replicas it is, and how many there are.
        alone: Whether there is nobody to exchange anything with, now or ever.
        one_process: Whether the replicas of `comm` are threads of one process.
        served: Whether parameters are on servers.
        servers: For each server, the Comm of the server (rank 0) and this replica (rank 1). Only the first
            replica of a group talks to servers; for the others it is empty.
        server_count: How many servers there are.
        staleness: The most updates that may lie between a gradient and its application, on servers.
        place: This replica's number on its machine, which decides its devices.
        terms: What the deployment was started with.
        waiting: Inside, this replica computes nothing: others of its process may.
        side: The same as `comm` for another thread of this replica, such as that of an exchange.
    """

    comm: Comm
    group: int = 0
    groups: int = 1
    alone: bool = False
    one_process: bool = False
    served: bool = False
    servers: Sequence[Comm] = ()
    server_count: int = 0
    staleness: int = 0
    place: int = 0
    terms: Terms = field(default_factory=Terms)
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    side: Comm = field(default=None)  # type: ignore[assignment]  # `comm`, unless given

    def __post_init__(self) -> None:
        self.side = self.side or self.comm


class Deployment(Spec):
    """Base of every deployment that a string can name."""

    @abstractmethod
    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        """Play every replica of this process, and serve where it is a server; the replicas' results."""

    def seat(self, terms: Terms) -> tuple[Seat, Callable[[], object]]:
        """The seat of this process's only replica, and what ends it. Raises `AttachError` for others."""
        raise AttachError(
            f"{self!r} starts replicas or servers by itself: put the script into a function main(replicator)"
            " and call Replicator(...).launch(main)"
        )


def only(seat: tuple[Seat, Callable[[], Any]], play: Callable[[Seat], T]) -> list[T]:
    """The result of the only replica of this process."""
    place, close = seat
    try:
        return [play(place)]
    finally:
        close()


def deployment_of(spec: Any) -> Deployment:
    """The deployment that a string names.

    >>> deployment_of("async(staleness=4)"), deployment_of("local")
    (asynchronous(staleness=4), local())
    """
    if isinstance(spec, str):
        spec = parse(re.sub(r"^\s*async\b", "asynchronous", spec))
    if not isinstance(spec, Deployment):
        raise SpecError(
            "a Replicator takes a deployment, 'single', 'sync', 'async', 'groups(size=4)' or"
            f" 'local(replicas=4)', got {spec!r}"
        )
    return spec
