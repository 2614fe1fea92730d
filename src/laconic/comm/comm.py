"""Comm: the only door to other ranks.

Every collective is called by all ranks in one order. Tensors stay on their device. `Metered` wraps any Comm
and counts; reducers see no other interface, so they run unchanged over torch.distributed, threads, or a
test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from laconic.comm.counter import Counter

ReduceOp = Literal["sum", "max", "min"]


class Comm(ABC):
    """A group of `size` ranks, seen from `rank`."""

    rank: int
    size: int

    @property
    def seats(self) -> Sequence[int]:
        """The number that each rank had before any was lost, ascending: by it a rank has its machine."""
        return range(self.size)

    @property
    def began(self) -> int:
        """How many ranks there were before any was lost."""
        return self.size

    @abstractmethod
    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """x (n,) becomes the sum (max, min) over ranks, in place and bit-identical on all; returns x."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin a sum that goes on by itself, if this group can; the call that is returned ends it.

        Until then nobody may touch x. Sums begin in one order on all ranks, and end in one order. Here: all
        of it happens at the end.
        """
        return lambda: self.all_reduce(x)

    @abstractmethod
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        """`chunks[r]` goes to rank r: the sum over ranks of the chunks meant for this rank."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x (m_r,), in rank order. Lengths may differ; dtype may not."""

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """`chunks[r]` goes to rank r: the chunks that came here, in rank order. Lengths may differ."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """x becomes the root's x, in place, equal shape on all; returns x."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Send `sends[peer]` and fill `recvs[peer]` in place, all at once; both sides know the shapes."""

    @abstractmethod
    def split(self, color: int) -> Comm:
        """The group of the ranks that give the same color, ranked as here. Called by all."""

    @abstractmethod
    def counter(self) -> Counter:
        """A number that this group shares, from 0, another one at each call. Called by all."""
