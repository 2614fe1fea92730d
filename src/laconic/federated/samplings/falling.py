"""Falling: a share of clients that decays, as DHQC samples them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.federated.samplings import Sampling


@dataclass(frozen=True, repr=False)
class Falling(Sampling):
    """share * exp(-rate * (round - 1)): a decaying share of the clients.

    Ji et al. 2020, arXiv:2003.09603, the source of DHQC's dynamic sampling (Jiang et al. 2022,
    arXiv:2212.14760): a reconstruction from the abstracts.

    >>> [Falling(0.2, rate=0.1).count(number, 100) for number in (1, 11, 101)]
    [20, 7, 2]
    """

    paper: ClassVar[str] = "Ji et al. 2020, arXiv:2003.09603"
    status: ClassVar[Status] = "reconstruction"

    share: float = 0.2
    rate: float = 0.01

    examples: ClassVar[tuple[str, ...]] = ("falling(0.2, rate=0.05)",)

    def __post_init__(self) -> None:
        arguments.number("falling: share", self.share, above=0, most=1)
        arguments.number("falling: rate", self.rate, least=0)

    def fraction(self, number: int) -> float:
        return self.share * math.exp(-self.rate * (number - 1))
