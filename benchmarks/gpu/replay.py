"""Recorded messages of real ranks, given again to one rank: its exchange is timed without the others.

An echo of the rank's own messages would not do. Lengths vary by rank. And in a reduce-scatter a rank sends
nothing to itself, so the echo of that is an empty message, which reports a bad gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter, SharedCounter

Log = list[tuple[str, Any]]


class Recorded(Comm):
    """A group that stores a copy of the result of each collective in `log`."""

    def __init__(self, comm: Comm, log: Log) -> None:
        self.comm, self.log = comm, log
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._keep("all_reduce", self.comm.all_reduce(x, op))

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        return self._keep("reduce_scatter", self.comm.reduce_scatter(chunks))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._keep_all("all_gather", self.comm.all_gather(x))

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        return self._keep_all("all_to_all", self.comm.all_to_all(chunks))

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self._keep("broadcast", self.comm.broadcast(x, root))

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self.comm.exchange(sends, recvs)
        self.log.append(("exchange", {peer: room.clone() for peer, room in recvs.items()}))

    def split(self, color: int) -> Recorded:
        part = self.comm.split(color)
        self.log.append(("split", (part.rank, part.size)))
        return Recorded(part, self.log)

    def counter(self) -> Counter:
        return self.comm.counter()

    def _keep(self, name: str, result: Tensor) -> Tensor:
        self.log.append((name, result.clone()))
        return result

    def _keep_all(self, name: str, results: list[Tensor]) -> list[Tensor]:
        room = torch.cat(results)  # in one buffer, as process groups on a GPU receive them
        self.log.append((name, list(room.split([each.numel() for each in results]))))
        return results


class Replayed(Comm):
    """A group whose collectives return the entries of a log, in order. Each entry is returned once."""

    def __init__(self, rank: int, size: int, entries: Log) -> None:
        self.rank, self.size = rank, size
        self._entries = entries[::-1]

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return x.copy_(self._next("all_reduce"))

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        found: Tensor = self._next("reduce_scatter")
        return found

    def all_gather(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = self._next("all_gather")
        return found

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = self._next("all_to_all")
        return found

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.copy_(self._next("broadcast"))

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        for peer, values in self._next("exchange").items():
            recvs[peer].copy_(values)

    def split(self, color: int) -> Replayed:
        rank, size = self._next("split")
        part = Replayed(rank, size, [])
        part._entries = self._entries
        return part

    def counter(self) -> Counter:
        return SharedCounter()

    def _next(self, name: str) -> Any:
        recorded, result = self._entries.pop()
        assert recorded == name, f"the rank calls {name}, it called {recorded} when it was recorded"
        return result


def rank_gradients(
    sizes: Sequence[int], rank: int, device: torch.device, make: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return gradients of a rank, float32 of these sizes: different on each rank, equal in each call."""
    rng = torch.Generator(device=device).manual_seed(1000 + rank)
    return [make(torch.randn(n, generator=rng, device=device)) for n in sizes]
