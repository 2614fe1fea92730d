"""Linear: ranks in a row, each with its two neighbours; the two ends have only one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Undirected


@dataclass(frozen=True, repr=False)
class Linear(Undirected):
    """Rank r and r + 1 exchange, at every step. Uniform mixing needs PushSum weights.

    "Linear" in the code of Assran et al. 2019 is a different graph.

    >>> [Linear().peers(rank=r, size=3, step=0).out for r in range(3)]
    [(1,), (0, 2), (1,)]
    """

    status: ClassVar[Status] = "own"

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        return ((rank, rank + 1) for rank in range(size - 1))
