"""Dirichlet: random shares of each kind, so kinds and sizes vary by client.

    p_c ~ Dirichlet(alpha, ..., alpha)      the share of kind c that each client gets, drawn per kind

Yurochkin et al. 2019, arXiv:1905.12022. `lda` draws per client instead, with equal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.core.turn import COMMON, mix
from laconic.data.partition import Partition

HINT = "0.1 is strongly skewed, 100 nearly even"


@dataclass(frozen=True, repr=False)
class Dirichlet(Partition):
    """Each kind is cut into shares drawn from Dirichlet(alpha); all examples are assigned.

    A client gets consecutive examples of each kind. Clients with fewer than `least` get the missing ones from
    the largest.

    Args:
        alpha: Concentration, above 0. A smaller value gives fewer kinds per client.
        least: Minimum number of a client's examples. `least` times clients is at most n.

    >>> from laconic.core.spec import parse
    >>> shares = parse("dirichlet(alpha=0.1, least=2)").deal([0, 1] * 50, clients=8, seed=1)
    >>> sum(map(len, shares)), min(map(len, shares)) >= 2
    (100, True)
    """

    alpha: float = 0.5
    least: int = 1

    paper: ClassVar[str] = "Yurochkin et al. 2019, arXiv:1905.12022"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet(alpha=0.1)", "dirichlet(alpha=1.0, least=20)")

    def __post_init__(self) -> None:
        arguments.number("dirichlet: alpha", self.alpha, above=0, hint=HINT)
        arguments.whole("dirichlet: least", self.least)

    def check_fits(self, kinds: Tensor, clients: int) -> None:
        if self.least * clients > len(kinds):
            raise SpecError(
                f"{self!r}: least must be at most {len(kinds) // clients} for {len(kinds)} examples on"
                f" {clients} clients, got {self.least}"
            )

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        rng = np.random.default_rng(mix(seed, clients, COMMON))
        found: list[list[Tensor]] = [[] for _ in range(clients)]
        for kind in np.unique(kinds.numpy()).tolist():
            of_kind = (kinds == kind).nonzero().flatten()
            ends = np.cumsum(rng.dirichlet(np.full(clients, float(self.alpha)))).clip(0, 1)
            cuts = (len(of_kind) * ends[:-1]).round().astype(int)
            for share, part in zip(found, of_kind.tensor_split(cuts.tolist()), strict=True):
                share.append(part)
        return _topped_up([torch.cat(parts).sort().values for parts in found], self.least)


def _topped_up(shares: list[Tensor], least: int) -> list[Tensor]:
    while min(map(len, shares)) < least:
        poor, rich = (pick(range(len(shares)), key=lambda client: len(shares[client])) for pick in (min, max))
        given = min(least - len(shares[poor]), len(shares[rich]) - least)
        assert given > 0, "least * clients is at most n"
        shares[poor] = torch.cat([shares[poor], shares[rich][:given]]).sort().values
        shares[rich] = shares[rich][given:]
    return shares
