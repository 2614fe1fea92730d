"""Loopback: ranks as threads of one process, for tests and for a group of one.

A collective is two meetings of all ranks: at the first each has laid down what it gives, at the second each
has copied what it takes. In between nobody writes, so tensors are shared without a lock. Sums run in rank
order in the tensor's own dtype: every rank does the same additions, and the result is bit-identical on all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter, SharedCounter
from laconic.core.errors import PeerError

T = TypeVar("T")
COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Loopback(Comm):
    """One rank of a group of threads. `Loopback.run` starts the threads.

    >>> Loopback.run(3, lambda comm: comm.all_reduce(torch.tensor([comm.rank + 1.0])).item())
    [6.0, 6.0, 6.0]
    """

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size

    @classmethod
    def world(cls, size: int, timeout_s: float = 60.0) -> list[Loopback]:
        """A new group, one object a rank; `world(1)[0]` is a rank that is alone."""
        room = _Room(size, timeout_s)
        return [cls(room, rank) for rank in range(size)]

    @classmethod
    def run(cls, size: int, fn: Callable[[Loopback], T], timeout_s: float = 60.0) -> list[T]:
        """fn(comm) on `size` threads; the results in rank order.

        The first exception ends the waiting of all others and is raised again here, its message led by its
        rank. `timeout_s` limits how long a rank waits for the others in one collective.
        """
        comms = cls.world(size, timeout_s)
        room, results = comms[0].room, [None] * size

        def play(comm: Loopback) -> None:
            try:
                results[comm.rank] = fn(comm)  # type: ignore[call-overload]
            except BaseException as error:
                room.fail(comm.rank, error)

        threads = [threading.Thread(target=play, args=(comm,), daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and room.failure is None:
                thread.join(0.1)
            thread.join(timeout_s)  # after a failure the others have this long to notice it
        if room.failure is not None:
            raise _named(*room.failure)
        return results  # type: ignore[return-value]

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return x.copy_(self._share("all_reduce", x, lambda given: _combined(given, op)))

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        self._check(chunks)

        def take(given: list[Sequence[Tensor]]) -> Tensor:
            return _combined([each[self.rank] for each in given])

        return self._share("reduce_scatter", chunks, take)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._share("all_gather", x, lambda given: [each.clone() for each in given])

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        self._check(chunks)
        return self._share("all_to_all", chunks, lambda given: [each[self.rank].clone() for each in given])

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.copy_(self._share("broadcast", x, lambda given: given[root].clone()))

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        def take(given: list[Mapping[int, Tensor]]) -> dict[int, Tensor]:
            for peer, room in recvs.items():
                came = given[peer].get(self.rank)
                if came is None:
                    raise PeerError(f"rank {self.rank} waits for rank {peer}, which sends it nothing")
                _check_shapes(came, room)
            return {peer: given[peer][self.rank].clone() for peer in recvs}

        for peer, came in self._share("exchange", sends, take).items():
            recvs[peer].copy_(came)

    def split(self, color: int) -> Loopback:
        def take(given: list[tuple[int, dict[int, _Room]]]) -> Loopback:
            peers = [rank for rank, (each, _) in enumerate(given) if each == color]
            rooms = given[0][1]  # rank 0's dictionary is the one that all use
            room = rooms.setdefault(color, _Room(len(peers), self.room.timeout_s, self.room.world))
            return Loopback(room, peers.index(self.rank))

        return self._share("split", (color, {}), take)

    def counter(self) -> Counter:
        def take(given: list[Counter]) -> Counter:
            return given[0]

        return self._share("counter", SharedCounter(), take)

    def _share(self, name: str, given: Any, take: Callable[[list[Any]], T]) -> T:
        """Lay down `given`, and take from what all ranks have laid down."""
        room = self.room
        room.table[self.rank] = (name, given)
        self._meet(name)
        others = {each for each, _ in room.table}
        if others != {name}:
            raise PeerError(f"rank {self.rank} calls {name} while another calls {min(others - {name})}")
        taken = take([each for _, each in room.table])
        self._meet(name)
        return taken

    def _meet(self, name: str) -> None:
        try:
            self.room.barrier.wait(self.room.timeout_s)
        except threading.BrokenBarrierError:
            failure = self.room.world.failure
            reason = (
                f"rank {failure[0]} failed: {failure[1]}"
                if failure
                else f"not all {self.size} ranks came within {self.room.timeout_s} s"
            )
            raise PeerError(f"rank {self.rank}, {name}: {reason}") from None

    def _check(self, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != self.size:
            raise ValueError(f"rank {self.rank}: one chunk a rank is {self.size} chunks, got {len(chunks)}")


class _Room:
    """Where the threads of one group meet. Rooms made by `split` share the fate of their world."""

    def __init__(self, size: int, timeout_s: float, world: _Room | None = None) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.barrier = threading.Barrier(size)
        self.table: list[tuple[str, Any]] = [("", None)] * size
        self.failure: tuple[int, BaseException] | None = None
        self.world: _Room = world or self
        self.lock = threading.Lock()
        self.rooms: list[_Room] = []
        self.world.join(self)

    def join(self, room: _Room) -> None:
        """Tie a room to this world."""
        with self.lock:
            self.rooms.append(room)
            if self.failure is not None:
                room.barrier.abort()

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure of this world and free everybody who waits in it."""
        with self.lock:
            self.failure = self.failure or (rank, error)
            for room in self.rooms:
                room.barrier.abort()


def _combined(tensors: list[Tensor], op: ReduceOp = "sum") -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _check_shapes(tensor, total)
        COMBINE[op](total, tensor, out=total)
    return total


def _check_shapes(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        mine, yours = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (other, one))
        raise PeerError(f"ranks disagree on a tensor: {mine} here, {yours} there")


def _named(rank: int, error: BaseException) -> BaseException:
    """The same exception, its message led by the rank that raised it."""
    text = str(error)
    if len(error.args) <= 1 and not text.startswith(f"rank {rank}"):
        error.args = (f"rank {rank}: {text}",)
    return error
