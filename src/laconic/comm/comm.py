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

        Args:
            x: Tensor (n,), of the same shape and dtype on all ranks.
            op: "sum" (default), "max" or "min".

        Raises:
            PeerError: A peer failed or left.
        """

    def mean_(self, x: Tensor) -> Tensor:
        """Replace x by its mean over ranks, as `all_reduce`; return x."""
        return self.all_reduce(x).div_(self.size)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a sum, in the background if possible. All ranks start and end their sums in one order.

        Args:
            x: Tensor (n,). Do not use it until the sum has ended.

        Returns:
            A function that waits for the sum and returns x.
        """
        return lambda: self.all_reduce(x)

    @abstractmethod
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        """Send `chunks[r]` to rank r; return the sum of the chunks for this rank, in rank order.

        Args:
            chunks: One per rank; all chunks for one rank have one shape.
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, in rank order.

        Args:
            x: Tensor (m_r,). Lengths may differ, dtypes may not.
        """

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send `chunks[r]` to rank r; return the chunks for this rank, in rank order.

        Args:
            chunks: One tensor (m,) per rank. Lengths may differ, dtypes may not.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copy the root's x to every rank, in place; return x.

        Args:
            x: Tensor of the same shape and dtype on all ranks.
            root: The rank that sends; default: 0.
        """

    @abstractmethod
    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Send and receive point to point, all at once.

        Args:
            sends: The tensor for each peer, by rank.
            recvs: The output for each peer's tensor, of the same shape and dtype.
        """

    @abstractmethod
    def split(self, color: int) -> Comm:
        """Return this rank's part of the group. Call it on all ranks.

        Args:
            color: Ranks with the same color form a group, in rank order.
        """

    @abstractmethod
    def counter(self) -> Counter:
        """Return a new counter from 0, shared by the group. Call it on all ranks."""

    def _check(self, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != self.size:
            raise ValueError(f"rank {self.rank}: chunks must be {self.size}, one per rank, got {len(chunks)}")
