"""Constant: the same share of the clients in each round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.federated.samplings import Sampling


@dataclass(frozen=True, repr=False)
class Constant(Sampling):
    """The same share of the clients in each round.

    >>> Constant(0.1).count(1, 100)
    10
    """

    status: ClassVar[Status] = "own"

    share: float = 0.1

    examples: ClassVar[tuple[str, ...]] = ("constant(0.1)",)

    def __post_init__(self) -> None:
        arguments.number("constant: share", self.share, above=0, most=1)

    def fraction(self, number: int) -> float:
        return self.share
