"""Deployment: where replicas run, and the `RankContext` of each."""

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
class LaunchOptions:
    """Options of a launch. `checkpoints`: folder of the servers; `every`: updates between checkpoints."""

    timeout_s: float = 1800.0
    checkpoints: Path | None = None
    every: int = 100


@dataclass
class RankContext:
    """One replica's place in a deployment.

    Attributes:
        comm: The replicas in sync, group number `group` of `groups`.
        alone: Whether no other replica or server exists.
        one_process: Whether the replicas of `comm` are threads.
        served: Whether servers have the parameters.
        servers: A Comm with each server (rank 0) and this replica (rank 1), on a group's first replica.
        staleness: Maximum staleness of a gradient that servers apply.
        place: Number of this replica on its machine.
        waiting: Context in which other replicas of the process may run.
        side: A Comm like `comm` for another thread.
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
    terms: LaunchOptions = field(default_factory=LaunchOptions)
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    side: Comm = field(default=None)  # type: ignore[assignment]  # `comm`, unless given

    def __post_init__(self) -> None:
        self.side = self.side or self.comm


class Deployment(Spec):
    """Base of deployments."""

    @abstractmethod
    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        """Run this process's replicas or server; return the replicas' results."""

    def seat(self, terms: LaunchOptions) -> tuple[RankContext, Callable[[], object]]:
        raise AttachError(
            f"{self!r} starts replicas or servers: put the script into a function main(replicator) and call"
            " Replicator(...).launch(main)"
        )


def only(seat: tuple[RankContext, Callable[[], Any]], play: Callable[[RankContext], T]) -> list[T]:
    place, close = seat
    try:
        return [play(place)]
    finally:
        close()


def deployment_of(spec: Any) -> Deployment:
    """Return the deployment that a string names.

    >>> deployment_of("async(staleness=4)"), deployment_of("local")
    (asynchronous(staleness=4), local())
    """
    if isinstance(spec, str):
        spec = parse(re.sub(r"^\s*async\b", "asynchronous", spec))
    if not isinstance(spec, Deployment):
        raise SpecError(
            "the spec must be a deployment, such as 'single', 'sync', 'async', 'groups(size=4)' or"
            f" 'local(replicas=4)', got {spec!r}"
        )
    return spec
