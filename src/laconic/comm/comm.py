"""Comm: the only interface to other ranks. All ranks call every collective, in one order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from laconic.comm.counter import Counter

ReduceOp = Literal["sum", "max", "min"]


class Comm(ABC):
    """Group of `size` ranks, seen from `rank` (0 to size - 1). Tensors stay on their device."""

    rank: int
    size: int

    @property
    def original_ranks(self) -> Sequence[int]:
        """Each rank's number before any rank was lost, ascending."""
        return range(self.size)

    @property
    def original_size(self) -> int:
        return self.size

    @abstractmethod
    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce x over ranks, in place, to a result that is bit-identical on all ranks; return x.

        x (n,) has the same shape and dtype on all ranks. Raises `PeerError` if a peer failed or left.
        """

    def mean_(self, x: Tensor) -> Tensor:
        """Replace x by its mean over ranks, as `all_reduce`; return x."""
        return self.all_reduce(x).div_(self.size)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a sum, in the background if possible; return a function that waits and returns x.

        All ranks start and end their sums in one order. Do not use x (n,) until the sum has ended.
        """
        return lambda: self.all_reduce(x)

    @abstractmethod
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        """Send `chunks[r]` to rank r; return the sum of the chunks for this rank, in rank order.

        All chunks for one rank have one shape.
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x (m_r,), in rank order. Lengths may differ, dtypes may not."""

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send `chunks[r]` (m,) to rank r; return the chunks for this rank, in rank order.

        Lengths may differ, dtypes may not.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copy the root's x, of the same shape and dtype on all ranks, to every rank, in place; return x."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Send `sends[r]` to rank r and receive into `recvs[r]`, of its shape and dtype, all at once."""

    @abstractmethod
    def split(self, color: int) -> Comm:
        """Return this rank's part of the group: the ranks with its color, in order. Call it on all ranks."""

    @abstractmethod
    def counter(self) -> Counter:
        """Return a new counter from 0, shared by the group. Call it on all ranks."""

    def _check(self, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != self.size:
            raise ValueError(f"rank {self.rank}: chunks must be {self.size}, one per rank, got {len(chunks)}")
