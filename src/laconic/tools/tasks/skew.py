"""Skewed shards: each worker sees few kinds of examples, as if data stayed where it was collected.

The partition `dirichlet` assigns examples. A worker draws its batches only from its own examples, in separate
epochs.
"""

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
    """Raise `SpecError` unless `alpha` is a finite number above 0."""
    arguments.number("--skew", alpha, above=0, hint=HINT)


@dataclass(frozen=True, eq=False)
class SkewedShard:
    """One rank's own examples, `batch` at a time; see `Shard`."""

    own: Tensor
    order: Shard  # of positions in `own`

    @classmethod
    def of(cls, kinds: Tensor, batch: int, rank: int, size: int, alpha: float, seed: int) -> SkewedShard:
        """Return the shard of rank `rank`. Raises `SpecError` if the batch is too large."""
        Shard(len(kinds), batch, rank, size, seed)  # raises if the batch is too large
        own = Dirichlet(alpha, least=batch).over(kinds, size, seed).indices(rank)
        return cls(own, Shard(len(own), batch, 0, 1, mix(seed, rank)))

    def indices(self, step: int) -> Tensor:
        """Return the indices of this step's examples, int64 (batch,); steps count from 0."""
        return self.own[self.order.indices(step)]

    def rng(self, step: int) -> torch.Generator:
        """Return the generator of this rank's augmentation at this step."""
        return self.order.rng(step)
