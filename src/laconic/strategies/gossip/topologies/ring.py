"""Ring: each rank with its two neighbours (D-PSGD's graph, Lian et al. 2017, arXiv:1705.09056)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Undirected


@dataclass(frozen=True, repr=False)
class Ring(Undirected):
    """Rank r and r + 1 (mod size) exchange, at every step. Agreement takes O(size^2) steps.

    >>> Ring().peers(rank=0, size=5, step=0).out
    (1, 4)
    """

    paper: ClassVar[str] = "Lian et al. 2017, arXiv:1705.09056"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        return ((rank, (rank + 1) % size) for rank in range(size))
