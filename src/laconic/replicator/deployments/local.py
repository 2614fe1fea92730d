"""Local: all replicas in one process, in step: to try a script out, and to test it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from laconic.comm.loopback import Loopback
from laconic.core import arguments
from laconic.replicator.baton import Baton, Passing, restore, states
from laconic.replicator.deployment import Deployment, Seat, Terms

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Local(Deployment):
    """Threads that take turns: each runs until it waits for the others, with a random state of its own.

    It computes what `sync` computes, in the time of all replicas together: torch's own threads are what uses
    the cores. The process keeps the random state that it had.

    Args:
        replicas: How many, 1 or more; default: 2.

    Raises:
        SpecError: `replicas` is out of range.
    """

    replicas: int = 2

    def __post_init__(self) -> None:
        arguments.whole("local: replicas", self.replicas, 1)

    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        lock, own = threading.Lock(), states(self.replicas)

        def replica(comm: Loopback) -> T:
            baton = Baton(lock, own[comm.rank])
            # a backward pass that waits for another replica must not block the one thread of a device
            with baton.held(), torch.autograd.set_multithreading_enabled(False):
                passing = Passing(comm, baton)
                return play(
                    Seat(
                        passing,
                        one_process=True,
                        place=comm.rank,
                        terms=terms,
                        waiting=baton.released,
                        side=comm,
                    )
                )

        try:
            return Loopback.run(self.replicas, replica, timeout_s=terms.timeout_s)
        finally:
            restore(own[0])
