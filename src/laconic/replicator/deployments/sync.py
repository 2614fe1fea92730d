"""Sync: one replica per process, all in sync; every update uses the gradients of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from laconic.core.spec import Status
from laconic.replicator.deployment import Deployment, LaunchOptions, RankContext, only
from laconic.replicator.world import join_world, local_rank

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Sync(Deployment):
    """All ranks of torchrun. An update waits for the slowest replica; a lost one ends training."""

    paper: ClassVar[str] = "Buchlovsky et al. 2019, arXiv:1902.00465"
    status: ClassVar[Status] = "recalled"

    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        return only(self.seat(terms), play)

    def seat(self, terms: LaunchOptions) -> tuple[RankContext, Callable[[], object]]:
        comm, close = join_world(terms.timeout_s, self)
        return RankContext(comm, place=local_rank(), terms=terms), close
