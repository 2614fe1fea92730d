"""Exponential: a few peers per step, at distances that grow by powers, so values spread in log n steps.

Assran et al. 2019, arXiv:1811.10792 (the default of its code). With one peer, 2^k ranks average
exactly: Ying et al. 2021, arXiv:2110.13363.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Shifts, powers


@dataclass(frozen=True, repr=False, init=False)
class Exponential(Shifts):
    """Every rank r sends to r + j (p+1)^i (mod size) at step t, with p = `peers`, j = 1..p, and

        i = t mod (floor(log_{p+1}(size - 1)) + 1)

    Uniform mixing over one period averages exactly if size is a power of p + 1. Otherwise two of the p peers
    may be the same rank, or the sender itself.

    Args:
        peers: Number of ranks that each rank sends to in a step, 1 or more; default: 1.

    >>> [Exponential().peers(rank=0, size=8, step=t).out for t in range(4)]
    [(1,), (2,), (4,), (1,)]
    """

    fanout: int  # `peers` in the spec; here a method

    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"
    examples: ClassVar[tuple[str, ...]] = ("exponential()", "exponential(peers=2)")

    def __init__(self, peers: int = 1) -> None:
        arguments.whole("exponential: peers", peers, least=1)
        object.__setattr__(self, "fanout", peers)

    def __repr__(self) -> str:
        return "exponential()" if self.fanout == 1 else f"exponential(peers={self.fanout})"

    def check_fits(self, size: int) -> None:
        if self.fanout >= size:
            raise SpecError(
                f"exponential: peers must be in 1..{size - 1} among {size} ranks, got {self.fanout};"
                " complete() sends to all others"
            )

    def period(self, size: int) -> int:
        return len(powers(self.fanout + 1, size))

    def distances(self, size: int, step: int) -> Iterator[int]:
        power = (self.fanout + 1) ** step  # 0 <= step < period
        return (j * power for j in range(1, self.fanout + 1))
