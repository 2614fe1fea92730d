"""Examples of a rank at a step, by (seed, rank, step).

An epoch is one permutation, equal on all ranks; rank r takes every `size`-th example from the r-th on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.errors import SpecError
from laconic.core.turn import COMMON, mix


@dataclass(frozen=True)
class Shard:
    """One rank's share of `n` examples, `batch` at a time.

    >>> shards = [Shard(n=12, batch=3, rank=rank, size=2, seed=0) for rank in range(2)]
    >>> sorted(i for shard in shards for step in range(2) for i in shard.indices(step).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """

    n: int
    batch: int
    rank: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch * self.size > self.n:
            raise SpecError(
                f"batch must be in [1, {self.n // self.size}] for {self.n} examples on {self.size} workers, "
                f"got {self.batch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.n // (self.batch * self.size)

    def indices(self, step: int) -> Tensor:
        epoch, turn = divmod(step, self.steps_per_epoch)
        order = _order(self.n, mix(self.seed, epoch, COMMON))
        return order[self.rank :: self.size][turn * self.batch : (turn + 1) * self.batch]

    def rng(self, step: int) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(mix(self.seed, step, self.rank) >> 1)


@lru_cache(maxsize=2)
def _order(n: int, key: int) -> Tensor:
    return torch.randperm(
        n, generator=torch.Generator("cpu").manual_seed(key >> 1), dtype=torch.int64, device="cpu"
    )
