"""Local: all replicas in one process, in sync, for tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from laconic.comm.loopback import Loopback
from laconic.core import arguments
from laconic.core.spec import Status
from laconic.replicator.deployment import Deployment, LaunchOptions, RankContext
from laconic.replicator.turn_lock import TurnLock, TurnTakingComm, restore, states

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Local(Deployment):
    """Replicas as threads, one running at a time, each with its own random state.

    Results equal those of `sync`. The process's random state is restored.

    Args:
        replicas: Number of replicas, at least 1; default: 2.

    Raises:
        SpecError: `replicas` is out of range.
    """

    status: ClassVar[Status] = "own"

    replicas: int = 2

    def __post_init__(self) -> None:
        arguments.whole("local: replicas", self.replicas, 1)

    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        lock, own = threading.Lock(), states(self.replicas)

        def replica(comm: Loopback) -> T:
            turn_lock = TurnLock(lock, own[comm.rank])
            # a waiting backward pass must not block a device's only thread
            with turn_lock.hold(), torch.autograd.set_multithreading_enabled(False):
                turn_taking = TurnTakingComm(comm, turn_lock)
                return play(
                    RankContext(
                        turn_taking,
                        one_process=True,
                        place=comm.rank,
                        terms=terms,
                        waiting=turn_lock.release,
                        side=comm,
                    )
                )

        try:
            return Loopback.run(self.replicas, replica, timeout_s=terms.timeout_s)
        finally:
            restore(own[0])
