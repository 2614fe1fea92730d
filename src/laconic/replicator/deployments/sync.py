"""Sync: one replica a process, all in step; every update has the gradients of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laconic.replicator.deployment import Deployment, Seat, Terms, only
from laconic.replicator.world import local_rank, opened

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Sync(Deployment):
    """All ranks of torchrun. An update waits for the slowest replica; a lost one ends the training."""

    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        return only(self.seat(terms), play)

    def seat(self, terms: Terms) -> tuple[Seat, Callable[[], object]]:
        comm, close = opened(terms.timeout_s, self)
        return Seat(comm, place=local_rank(), terms=terms), close
