"""Random matching: new random pairs at each step (randomised gossip, Boyd et al. 2006)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.core.turn import mix, name_key
from laconic.strategies.gossip.topologies import Arrow, Undirected


@dataclass(frozen=True, repr=False)
class RandomMatching(Undirected):
    """Each rank pairs with one other; all matchings are equally likely. With an odd size, one rank pauses.

    All ranks derive the same pairs. A step keeps about half of the squared disagreement, at any size.

    Args:
        seed: Seed of the pairs, 0 or more; default: 0.

    >>> one, other = (RandomMatching(seed=1).peers(rank, size=2, step=5) for rank in (0, 1))
    >>> one.out, other.out
    ((1,), (0,))
    """

    seed: int = 0

    paper: ClassVar[str] = "Boyd et al. 2006, Randomized gossip algorithms"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("random_matching()", "random_matching(seed=7)")

    def __post_init__(self) -> None:
        arguments.whole("random_matching: seed", self.seed)

    def period(self, size: int) -> None:
        return None

    def links(self, size: int, step: int) -> Iterator[Arrow]:
        here = name_key(self.name)
        order = sorted(range(size), key=lambda rank: (mix(self.seed, step, here, rank), rank))
        return zip(order[0::2], order[1::2], strict=False)
