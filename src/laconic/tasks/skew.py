"""Skewed shards: each worker sees few kinds of examples, as if data stayed where it was collected.

    p_c ~ Dirichlet(alpha, ..., alpha)      the share of kind c that each worker gets, drawn per kind

Yurochkin et al. 2019, arXiv:1905.12022. With alpha 0.1 most of a kind is on one or two workers; with 100 it
is spread nearly evenly. A worker draws its batches only from its own examples, in epochs of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.turn import COMMON, mix
from laconic.tasks.shard import Shard

HINT = "0.1 skews strongly, 100 hardly at all; without --skew all workers draw from all examples"


def check_skew(alpha: float) -> None:
    """Raise `SpecError` unless `alpha` is a finite number above 0."""
    arguments.number("--skew", alpha, above=0, hint=HINT)


def dealt(kinds: Tensor, size: int, alpha: float, seed: int, least: int) -> list[Tensor]:
    """Indices of each worker's examples: ascending int64, each example on exactly one of `size` workers.

    `kinds` (n,): integers. A worker gets consecutive examples of each kind, so passages of a text. A worker
    with fewer than `least` examples gets the missing ones from the worker with most; `least * size` is at
    most n. The result depends only on the arguments, so it is the same on every rank.
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
    """The shards after moving examples, so that each has `least` or more."""
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
    order: Shard  # of positions in `own`

    @classmethod
    def of(cls, kinds: Tensor, batch: int, rank: int, size: int, alpha: float, seed: int) -> SkewedShard:
        """The shard of rank `rank`. Raises `SpecError` if the batch is too large."""
        Shard(len(kinds), batch, rank, size, seed)  # raises if the batch is too large
        own = dealt(kinds, size, alpha, seed, batch)[rank]
        return cls(own, Shard(len(own), batch, 0, 1, mix(seed, rank)))

    def indices(self, step: int) -> Tensor:
        """Indices of this step's examples, int64 (batch,); steps count from 0."""
        return self.own[self.order.indices(step)]

    def rng(self, step: int) -> torch.Generator:
        """The random numbers of this rank's augmentation at this step."""
        return self.order.rng(step)
