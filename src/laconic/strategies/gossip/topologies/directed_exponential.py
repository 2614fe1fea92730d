"""Directed exponential: one peer per step, alternately ahead and behind, at distances 1, 2, 4, ...

Assran et al. 2019, arXiv:1811.10792: graph 0 of its code, which its job scripts use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Shifts, powers


@dataclass(frozen=True, repr=False)
class DirectedExponential(Shifts):
    """Every rank r sends to r + 1, r - 1, r + 2, r - 2, r + 4, ... (mod size), one per step.

    A rank may occur twice, as in the authors' code.

    >>> [DirectedExponential().peers(rank=0, size=8, step=t).out[0] for t in range(6)]
    [1, 7, 2, 6, 4, 4]
    """

    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"

    def period(self, size: int) -> int:
        return 2 * len(powers(2, size))

    def distances(self, size: int, step: int) -> tuple[int]:
        return ((-1) ** step * 2 ** (step // 2),)
