"""A world of slow links with clocks of its own: messages take the time that a link would, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter
from laconic.comm.loopback import Loopback


@dataclass
class Clock:
    """One rank's seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SlowLink(Comm):
    """A rank of `comm` whose every collective takes `latency_s`, and its bytes at `bytes_a_second`."""

    def __init__(self, comm: Loopback, clock: Clock, bytes_a_second: float, latency_s: float = 1e-4) -> None:
        self.comm, self.rank, self.size, self.clock = comm, comm.rank, comm.size, clock
        self.bytes_a_second, self.latency_s = bytes_a_second, latency_s

    def _take(self, nbytes: float) -> None:
        self.clock.now += self.latency_s + nbytes / self.bytes_a_second

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        self._take(2 * (self.size - 1) / self.size * x.nbytes)
        return self.comm.all_reduce(x, op)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        came = self.comm.all_gather(x)
        self._take(sum(each.nbytes for each in came) - x.nbytes)
        return came

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        self._take(sum(chunk.nbytes for chunk in chunks) * (self.size - 1) / self.size)
        return self.comm.all_to_all(chunks)

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        self._take(sum(chunk.nbytes for chunk in chunks) * (self.size - 1) / self.size)
        return self.comm.reduce_scatter(chunks)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self._take(x.nbytes)
        return self.comm.broadcast(x, root)

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self._take(sum(each.nbytes for each in sends.values()))
        self.comm.exchange(sends, recvs)

    def split(self, color: int) -> SlowLink:
        return SlowLink(self.comm.split(color), self.clock, self.bytes_a_second, self.latency_s)

    def counter(self) -> Counter:
        return self.comm.counter()
