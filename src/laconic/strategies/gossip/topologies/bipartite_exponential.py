"""Bipartite exponential: an odd and an even rank form a pair, at distances 1, 3, 5, 9, 17, ...

Graph 1 of the code of Assran et al. 2019, arXiv:1811.10792, there for D-PSGD and AD-PSGD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Undirected, powers


@dataclass(frozen=True, repr=False)
class BipartiteExponential(Undirected):
    """Odd rank r pairs with r + 1, r - 1, r + 3, r - 3, ..., r + (1 + 2^i), r - (1 + 2^i), one per step.

    In the authors' code even ranks send by their own such list; here they answer, so that each step is
    symmetric.

    >>> [BipartiteExponential().peers(rank=1, size=8, step=t).out[0] for t in range(6)]
    [2, 0, 4, 6, 6, 4]
    """

    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"

    def check_fits(self, size: int) -> None:
        if size % 2:
            raise SpecError(
                f"{self!r} pairs odd ranks with even ones and needs an even number of ranks, got {size};"
                f" use {size - 1} or {size + 1}, or random_matching(), in which one rank pauses"
            )

    def period(self, size: int) -> int:
        return 2 * len(powers(2, size))

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        distance = (-1) ** step * (1 + 2 ** (step // 2) if step > 1 else 1)
        return ((rank, (rank + distance) % size) for rank in range(1, size, 2))
