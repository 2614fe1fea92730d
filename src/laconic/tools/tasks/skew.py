"""Skewed shards: each worker draws from its own examples, by `dirichlet`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.turn import mix
from laconic.data.partition.dirichlet import Dirichlet
from laconic.tools.tasks.shard import Shard

HINT = "0.1 skews strongly, 100 hardly at all; without --skew all workers draw from all examples"


def check_skew(alpha: float) -> None:
    arguments.number("--skew", alpha, above=0, hint=HINT)


@dataclass(frozen=True, eq=False)
class SkewedShard:
    own: Tensor
    order: Shard  # of positions in `own`

    @classmethod
    def of(cls, kinds: Tensor, batch: int, rank: int, size: int, alpha: float, seed: int) -> SkewedShard:
        Shard(len(kinds), batch, rank, size, seed)  # checks the batch
        own = Dirichlet(alpha, least=batch).over(kinds, size, seed).indices(rank)
        return cls(own, Shard(len(own), batch, 0, 1, mix(seed, rank)))

    def indices(self, step: int) -> Tensor:
        return self.own[self.order.indices(step)]

    def rng(self, step: int) -> torch.Generator:
        return self.order.rng(step)
