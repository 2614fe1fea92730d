"""LDA: each client draws its own mix of kinds, and all clients get equally many examples.

    q_i ~ Dirichlet(alpha, ..., alpha)      the mix of kinds of client i, drawn per client

Hsu et al. 2019, arXiv:1909.06335; in ZeroFL (Qiu et al. 2022, arXiv:2208.02507) alpha is 1000 for IID and 1
for non-IID. `dirichlet` draws per kind instead, with unequal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.data.draws import order
from laconic.data.partition import Partition, ascending, classes, even_cuts

HINT = "0.1 is strongly skewed, 1000 nearly even"


@dataclass(frozen=True, repr=False)
class LDA(Partition):
    """Clients draw kinds from their mixes in order, without replacement; sizes differ by at most one.

    An exhausted kind leaves the mix, which is rescaled; once a whole mix is exhausted, the other
    kinds are drawn evenly. (Flower's code also adds 1e-5 to each kind.)

    Args:
        alpha: Concentration, above 0. A smaller value gives fewer kinds per client.

    >>> from laconic.core.spec import parse
    >>> [len(share) for share in parse("lda(alpha=0.1)").deal([0, 1, 2] * 10, clients=4)]
    [8, 8, 7, 7]
    """

    alpha: float = 1.0

    paper: ClassVar[str] = "Hsu et al. 2019, arXiv:1909.06335"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "adap/flower"
    examples: ClassVar[tuple[str, ...]] = ("lda()", "lda(alpha=1000.0)")

    def __post_init__(self) -> None:
        arguments.number("lda: alpha", self.alpha, above=0, hint=HINT)

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        found, place = classes(kinds)
        shuffled = order(self.key(seed), len(kinds))
        piles = [shuffled[place[shuffled] == kind] for kind in range(len(found))]
        left = np.array([len(pile) for pile in piles])
        ends = [0, *even_cuts(len(kinds), clients), len(kinds)]
        dealt = []
        for client in range(clients):
            rng = np.random.default_rng(self.key(seed, client))
            mixture = rng.dirichlet(np.full(len(found), float(self.alpha)))
            taken = _drawn(rng, mixture, left, ends[client + 1] - ends[client])
            own = [pile[rest - take : rest] for pile, rest, take in zip(piles, left, taken, strict=True)]
            dealt.append(ascending(own))
            left = left - taken
        return dealt


def _drawn(
    rng: np.random.Generator, mixture: NDArray[np.float64], left: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return the counts per kind of `size` draws; draws beyond the rest of a kind are drawn again."""
    taken = np.zeros_like(left)
    while missing := size - int(taken.sum()):
        open_kinds = taken < left
        weights = np.where(open_kinds, mixture, 0.0)
        if not weights.sum() > 0:
            weights = open_kinds.astype(np.float64)
        taken = np.minimum(taken + rng.multinomial(missing, weights / weights.sum()), left)
    return taken
