"""Static exponential: at every step, all ranks at distances 1, 2, 4, ...

Ying et al. 2021, arXiv:2110.13363; checked against BlueFog, their library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Shifts, powers


@dataclass(frozen=True, repr=False)
class StaticExponential(Shifts):
    """Every rank r sends to r + 2^i (mod size) for all 2^i < size: about log2(size) messages per step.

    >>> StaticExponential().peers(rank=0, size=8, step=0)
    Peers(out=(1, 2, 4), into=(4, 6, 7))
    """

    paper: ClassVar[str] = "Ying et al. 2021, arXiv:2110.13363"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "Bluefog-Lib/bluefog"

    def distances(self, size: int, step: int) -> list[int]:
        return powers(2, size)
