"""Linear: ranks in a row, each with the one before and the one after; the two ends have one neighbour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laconic.strategies.gossip.shapes import Undirected
from laconic.strategies.gossip.topology import Arrow


@dataclass(frozen=True, repr=False)
class Linear(Undirected):
    """Rank r and r + 1 exchange, at every step. Not regular: uniform mixing needs PushSum weights.

    "Linear" in the code of Assran et al. 2019 is another thing: all odd distances, by turns.

    >>> [Linear().peers(rank=r, size=3, step=0).out for r in range(3)]
    [(1,), (0, 2), (1,)]
    """

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        return ((rank, rank + 1) for rank in range(size - 1))
