"""Complete: each rank with all others; one step averages exactly, with the traffic of a dense all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Undirected


@dataclass(frozen=True, repr=False)
class Complete(Undirected):
    """Complete graph, at every step.

    >>> Complete().peers(rank=1, size=4, step=0).out
    (0, 2, 3)
    """

    status: ClassVar[Status] = "own"

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        return combinations(range(size), 2)
