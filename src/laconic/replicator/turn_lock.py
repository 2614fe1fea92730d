"""Baton: replicas of one process take turns, each with a random state of its own.

torch's default generator belongs to the process. If replicas drew from it as their threads happen to run, no
two runs would be alike. So a replica runs only while it holds the baton, and gives it on where it waits for
the others. With it goes the state of the default generators of torch, Python and NumPy: a script that seeds
them gets what it would get in a process of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter

T = TypeVar("T")
RandomState = tuple[Tensor, Any, Any]


class Baton:
    """One replica's hold on it. `lock`: of all replicas of the process. `state`: the random one at first."""

    def __init__(self, lock: threading.Lock, state: RandomState) -> None:
        self._lock, self._state = lock, state

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this replica runs alone, with its own random state."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, this replica waits, and others run."""
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._lock.acquire()
        restore(self._state)

    def _give(self) -> None:
        self._state = present()
        self._lock.release()


def present() -> RandomState:
    """The state of the default generators of torch, Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(state: RandomState) -> None:
    """The reverse of `present`."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def states(count: int) -> list[RandomState]:
    """A random state for each replica: the first has the process's own, the others are seeded from it."""
    seed, found = torch.initial_seed(), [present()]
    for replica in range(1, count):
        draws = random.Random(f"{seed} {replica}")
        generator = torch.Generator("cpu").manual_seed(draws.getrandbits(63))
        numbers = np.random.RandomState(random.Random(f"{seed} {replica} numpy").getrandbits(32)).get_state()
        found.append((generator.get_state(), draws.getstate(), numbers))
    return found


class Passing(Comm):
    """A Comm whose caller gives the baton on while it waits for the others."""

    def __init__(self, comm: Comm, baton: Baton) -> None:
        self.comm, self.rank, self.size, self._baton = comm, comm.rank, comm.size, baton

    def _wait(self, call: Callable[[], T]) -> T:
        with self._baton.released():
            return call()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._wait(lambda: self.comm.all_reduce(x, op))

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        return self._wait(lambda: self.comm.reduce_scatter(chunks))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._wait(lambda: self.comm.all_gather(x))

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        return self._wait(lambda: self.comm.all_to_all(chunks))

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self._wait(lambda: self.comm.broadcast(x, root))

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self._wait(lambda: self.comm.exchange(sends, recvs))

    def split(self, color: int) -> Passing:
        return Passing(self._wait(lambda: self.comm.split(color)), self._baton)

    def counter(self) -> Counter:
        return self._wait(self.comm.counter)
