"""Lock that lets one replica of a process run at a time, and swaps the random state with it.

Threads that draw from the process's generators, of torch, Python and NumPy, would not be reproducible.
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


class TurnLock:
    def __init__(self, lock: threading.Lock, state: RandomState) -> None:
        self._lock, self._state = lock, state

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._acquire_lock()
        try:
            yield
        finally:
            self._release_lock()

    @contextmanager
    def release(self) -> Iterator[None]:
        self._release_lock()
        try:
            yield
        finally:
            self._acquire_lock()

    def _acquire_lock(self) -> None:
        self._lock.acquire()
        restore(self._state)

    def _release_lock(self) -> None:
        self._state = random_state()
        self._lock.release()


def random_state() -> RandomState:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def states(count: int) -> list[RandomState]:
    seed, found = torch.initial_seed(), [random_state()]
    for replica in range(1, count):
        draws = random.Random(f"{seed} {replica}")
        generator = torch.Generator("cpu").manual_seed(draws.getrandbits(63))
        numbers = np.random.RandomState(random.Random(f"{seed} {replica} numpy").getrandbits(32)).get_state()
        found.append((generator.get_state(), draws.getstate(), numbers))
    return found


class TurnTakingComm(Comm):
    """Comm that releases the turn lock during collectives."""

    def __init__(self, comm: Comm, turn_lock: TurnLock) -> None:
        self.comm, self.rank, self.size, self._turn_lock = comm, comm.rank, comm.size, turn_lock

    def _wait(self, call: Callable[[], T]) -> T:
        with self._turn_lock.release():
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

    def split(self, color: int) -> TurnTakingComm:
        return TurnTakingComm(self._wait(lambda: self.comm.split(color)), self._turn_lock)

    def counter(self) -> Counter:
        return self._wait(self.comm.counter)
