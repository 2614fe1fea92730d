"""Skewed shards: workers that see few kinds of examples each, as data that stays where it was made does.

    p_c ~ Dirichlet(alpha, ..., alpha)      the share of kind c that each worker gets, drawn for every kind

Yurochkin et al. 2019, arXiv:1905.12022. With alpha 0.1 most of a kind is on one or two workers, with 100 it
is nearly even. A worker draws its batches from its own examples for ever, in epochs of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.turn import COMMON, mix
from laconic.tasks.shard import Shard

WAY_OUT = "0.1 is much skew, 100 hardly any; without it all workers draw from all examples"


def check_skew(alpha: float) -> None:
    """Raise `SpecError` unless `alpha` is a finite number above 0."""
    arguments.number("--skew", alpha, above=0, way_out=WAY_OUT)


def dealt(kinds: Tensor, size: int, alpha: float, seed: int, least: int) -> list[Tensor]:
    """Which examples each of `size` workers has: ascending int64, each example on one worker.

    `kinds` (n,): integers. A worker gets a run of each kind's examples, so of a text a passage. One with
    fewer than `least` examples takes what it lacks from the worker that has most; `least * size` is at most
    n. A function of its arguments: every rank deals alike.
    """
    rng = np.random.default_rng(mix(seed, size, COMMON))
    shards: list[list[Tensor]] = [[] for _ in range(size)]
    for kind in np.unique(kinds.numpy()).tolist():
        of_kind = (kinds == kind).nonzero().flatten()
        ends = np.cumsum(rng.dirichlet(np.full(size, float(alpha)))).clip(0, 1)
        cuts = (len(of_kind) * ends[:-1]).round().astype(int)
        for shard, part in zip(shards, of_kind.tensor_split(cuts.tolist()), strict=True):
            shard.append(part)
    return _topped_up([torch.cat(parts).sort().values for parts in shards], least)


def _topped_up(shards: list[Tensor], least: int) -> list[Tensor]:
    """The same, with `least` examples or more on each worker."""
    while min(map(len, shards)) < least:
        poor, rich = (pick(range(len(shards)), key=lambda rank: len(shards[rank])) for pick in (min, max))
        given = min(least - len(shards[poor]), len(shards[rich]) - least)
        assert given > 0, "least * size is at most n"
        shards[poor] = torch.cat([shards[poor], shards[rich][:given]]).sort().values
        shards[rich] = shards[rich][given:]
    return shards


@dataclass(frozen=True, eq=False)
class SkewedShard:
    """One rank's own examples, `batch` at a time; see `Shard`."""

    own: Tensor
    order: Shard  # of the places in `own`

    @classmethod
    def of(cls, kinds: Tensor, batch: int, rank: int, size: int, alpha: float, seed: int) -> SkewedShard:
        """Rank `rank`'s share of what is dealt. Raises `SpecError` for too large a batch."""
        Shard(len(kinds), batch, rank, size, seed)  # refuses it
        own = dealt(kinds, size, alpha, seed, batch)[rank]
        return cls(own, Shard(len(own), batch, 0, 1, mix(seed, rank)))

    def indices(self, step: int) -> Tensor:
        """Examples of this step (counted from 0), int64 (batch,)."""
        return self.own[self.order.indices(step)]

    def rng(self, step: int) -> torch.Generator:
        """The random numbers of this rank's augmentation at this step."""
        return self.order.rng(step)
