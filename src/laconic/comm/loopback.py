"""Loopback: ranks as threads of one process, for tests and for a group of one.

Before a collective's first barrier, each rank puts its tensors on a shared table; before the second, it
copies its outputs. All ranks add in rank order, to a bit-identical result.
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
    """One rank of a group of threads, started by `Loopback.run`.

    >>> Loopback.run(3, lambda comm: comm.all_reduce(torch.tensor([comm.rank + 1.0])).item())
    [6.0, 6.0, 6.0]
    """

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size

    @classmethod
    def world(cls, size: int, timeout_s: float = 60.0) -> list[Loopback]:
        """Return a new group, one object per rank."""
        room = _Room(size, timeout_s)
        return [cls(room, rank) for rank in range(size)]

    @classmethod
    def run(cls, size: int, fn: Callable[[Loopback], T], timeout_s: float = 60.0) -> list[T]:
        """Call `fn` on every rank of a new group, with its `Loopback`; return the results in rank order.

        `timeout_s`: seconds that a rank waits in one collective. Raises the first exception of any rank, or
        the one that it quotes, naming the rank.
        """
        comms = cls.world(size, timeout_s)
        room, results = comms[0].room, [None] * size

        def run_rank(comm: Loopback) -> None:
            try:
                results[comm.rank] = fn(comm)  # type: ignore[call-overload]
            except BaseException as error:
                room.fail(comm.rank, error)

        threads = [threading.Thread(target=run_rank, args=(comm,), daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and room.failure is None:
                thread.join(0.1)
            thread.join(timeout_s)
        if room.failure is not None:
            raise _named(*room.failure)
        return results  # type: ignore[return-value]

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return x.copy_(self._share("all_reduce", x, lambda given: _combined(given, op)))

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        self._check(chunks)

        def read(given: list[Sequence[Tensor]]) -> Tensor:
            return _combined([each[self.rank] for each in given])

        return self._share("reduce_scatter", chunks, read)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._share("all_gather", x, lambda given: [each.clone() for each in given])

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        self._check(chunks)
        return self._share("all_to_all", chunks, lambda given: [each[self.rank].clone() for each in given])

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.copy_(self._share("broadcast", x, lambda given: given[root].clone()))

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        def read(given: list[Mapping[int, Tensor]]) -> dict[int, Tensor]:
            for peer, room in recvs.items():
                received = given[peer].get(self.rank)
                if received is None:
                    raise PeerError(f"rank {self.rank} waits for rank {peer}, which sends nothing to it")
                _check_shapes(received, room)
            return {peer: given[peer][self.rank].clone() for peer in recvs}

        for peer, received in self._share("exchange", sends, read).items():
            recvs[peer].copy_(received)

    def split(self, color: int) -> Loopback:
        def read(given: list[tuple[int, dict[int, _Room]]]) -> Loopback:
            peers = [rank for rank, (each, _) in enumerate(given) if each == color]
            rooms = given[0][1]  # all use rank 0's dictionary
            room = rooms.setdefault(color, _Room(len(peers), self.room.timeout_s, self.room.world))
            return Loopback(room, peers.index(self.rank))

        return self._share("split", (color, {}), read)

    def counter(self) -> Counter:
        def read(given: list[Counter]) -> Counter:
            return given[0]

        return self._share("counter", SharedCounter(), read)

    def _share(self, name: str, given: Any, read: Callable[[list[Any]], T]) -> T:
        room = self.room
        room.table[self.rank] = (name, given)
        self._meet(name)
        others = {each for each, _ in room.table}
        if others != {name}:
            raise PeerError(f"rank {self.rank} calls {name} while another calls {min(others - {name})}")
        result = read([each for _, each in room.table])
        self._meet(name)
        return result

    def _meet(self, name: str) -> None:
        try:
            self.room.barrier.wait(self.room.timeout_s)
        except threading.BrokenBarrierError:
            failure = self.room.world.failure
            reason = (
                f"rank {failure[0]} failed: {failure[1]}"
                if failure
                else f"not all {self.size} ranks arrived within {self.room.timeout_s} s"
            )
            raise PeerError(f"rank {self.rank}, {name}: {reason}") from None


class _Room:
    """Shared table and barrier of a group. If a rank fails, all groups made by `split` fail."""

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
        with self.lock:
            self.rooms.append(room)
            if self.failure is not None:
                room.barrier.abort()

    def fail(self, rank: int, error: BaseException) -> None:
        """Store the first failure, or the one that it quotes, and wake all waiting ranks."""
        with self.lock:
            first = self.failure and self.failure[1]
            if first is None or (isinstance(first, PeerError) and str(error) and str(error) in str(first)):
                self.failure = rank, error
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
    text = str(error)
    if len(error.args) <= 1 and not text.startswith(f"rank {rank}"):
        error.args = (f"rank {rank}: {text}",)
    return error
