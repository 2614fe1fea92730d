"""Single: one replica, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laconic.comm.loopback import Loopback
from laconic.replicator.deployment import Deployment, Seat, Terms, only

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Single(Deployment):
    """Plain training on one device: nothing is exchanged, so nothing is compressed either."""

    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        return only(self.seat(terms), play)

    def seat(self, terms: Terms) -> tuple[Seat, Callable[[], object]]:
        return Seat(Loopback.world(1)[0], alone=True, one_process=True, terms=terms), lambda: None
