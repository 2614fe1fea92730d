"""Single: one replica, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from laconic.comm.loopback import Loopback
from laconic.core.spec import Status
from laconic.replicator.deployment import Deployment, LaunchOptions, RankContext, only

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Single(Deployment):
    """Plain training on one device, without exchange or compression."""

    status: ClassVar[Status] = "own"

    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        return only(self.seat(terms), play)

    def seat(self, terms: LaunchOptions) -> tuple[RankContext, Callable[[], object]]:
        return RankContext(Loopback.world(1)[0], alone=True, one_process=True, terms=terms), lambda: None
