"""Comm: the only interface to other ranks.

All ranks call every collective, in one order. Tensors stay on their device. `Metered` wraps any Comm and
counts. Reducers see no other interface, so they run unchanged over torch.distributed, threads or a test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from laconic.comm.counter import Counter

ReduceOp = Literal["sum", "max", "min"]


class Comm(ABC):
    """A group of `size` ranks, seen from `rank`.

    Attributes:
        rank: This rank's number in the group, 0 to size - 1.
        size: The number of ranks.
    """

    rank: int
    size: int

    @property
    def original_ranks(self) -> Sequence[int]:
        """Each rank's number before any rank was lost, ascending; it determines a rank's machine."""
        return range(self.size)

    @property
    def original_size(self) -> int:
        """The number of ranks before any was lost."""
        return self.size

    @abstractmethod
    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce x over ranks, in place, with a result that is bit-identical on all.

        Args:
            x: A tensor (n,), of the same shape and dtype on all ranks.
            op: "sum" (default), "max" or "min".

        Returns:
            x.

        Raises:
            PeerError: A peer failed or left.
        """

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a sum that runs in the background if the backend supports it; by default it runs at the end.

        All ranks start their sums in one order, and end them in one order.

        Args:
            x: A tensor (n,). Do not use it until the sum has ended.

        Returns:
            A function that waits for the sum and returns x.
        """
        return lambda: self.all_reduce(x)

    @abstractmethod
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        """Send `chunks[r]` to rank r; add up the chunks for this rank.

        Args:
            chunks: One tensor for each rank; all chunks for one rank have one shape.

        Returns:
            The sum over ranks of the chunks for this rank, in rank order.
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Send x to every rank.

        Args:
            x: A tensor (m_r,). Its length may differ between ranks; its dtype may not.

        Returns:
            Every rank's x, in rank order.
        """

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send `chunks[r]` to rank r.

        Args:
            chunks: One tensor (m,) for each rank. Lengths may differ; dtypes may not.

        Returns:
            The chunks for this rank, in rank order of their senders.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copy the root's x to every rank, in place.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            root: The rank that sends; default: 0.

        Returns:
            x.
        """

    @abstractmethod
    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Send and receive point to point, all at once.

        Args:
            sends: The tensor for each peer, by rank.
            recvs: The output for each peer's tensor, by rank, of the same shape and dtype.
        """

    @abstractmethod
    def split(self, color: int) -> Comm:
        """Split the group. Call it on all ranks.

        Args:
            color: Ranks with the same color form a group, in the order of their ranks here.

        Returns:
            The new group of this rank.
        """

    @abstractmethod
    def counter(self) -> Counter:
        """Return a new counter from 0, shared by the group. Call it on all ranks."""

    def _check(self, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != self.size:
            raise ValueError(f"rank {self.rank}: chunks must be {self.size}, one per rank, got {len(chunks)}")
