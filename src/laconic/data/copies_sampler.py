"""Sampler of examples and copies.

Draws depend only on (seed, epoch, index, copy), and on the visit if a sampler repeats an example. Ranks
g * copies to (g + 1) * copies - 1 share examples. In a batch, all examples of copy 0 come first: ghost
BatchNorm needs distinct examples per chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.turn import COMMON, mix
from laconic.data.draws import order

Across = Literal["ranks", "batch"]


class Draw(NamedTuple):
    """Index of an example, of its copy, and the 64-bit key of its augmentation."""

    example: int
    copy: int
    key: int


@dataclass(frozen=True)
class Reading:
    """Reads of a step, over all ranks: `inputs` to the model, of `distinct` examples."""

    inputs: int
    distinct: int


class CopiesSampler(Sampler[list[Draw]]):
    """Batches of draws for one rank; each iteration is the next epoch.

    `set_epoch(epoch, start)` continues at any step without saved state. Examples that do not fill a step on
    all ranks are dropped, different ones in each epoch.

    Args:
        source: Number of examples, which are shuffled; or a sampler of them, equal on all ranks.
        batch: Distinct examples per rank and step: a batch has `batch` inputs, or `copies * batch` with
            across="batch".
        copies: Augmented copies of each example, 1 or more.
        across: "ranks", where groups of ranks share examples, or "batch".
        rank: This rank.
        size: Number of ranks; a multiple of `copies` if across="ranks".
        seed: Equal on all ranks.
        shuffle: Whether to shuffle, if `source` is a number.

    Raises:
        SpecError: The copies do not divide the ranks, the data have fewer examples than a step, or an
            argument is out of range.

    >>> first, second = (CopiesSampler(4, 2, 2, "ranks", rank=r, size=2) for r in range(2))
    >>> [[a.example == b.example, a.key == b.key] for a, b in zip(next(iter(first)), next(iter(second)))]
    [[True, False], [True, False]]
    >>> [(draw.example, draw.copy) for draw in next(iter(CopiesSampler(4, 2, 2, "batch", shuffle=False)))]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    """

    def __init__(
        self,
        source: int | Sampler[Any],
        batch: int,
        copies: int,
        across: Across = "ranks",
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        arguments.whole("copies", copies, 1)
        arguments.choice("across", across, ("ranks", "batch"))
        arguments.whole("batch", batch, 1)
        arguments.whole("size", size, 1)
        arguments.whole("rank", rank, 0, size - 1)
        if across == "ranks" and size % copies:
            low = max(d for d in range(1, copies + 1) if size % d == 0)
            raise SpecError(
                f"copies across ranks must divide their number, {size}, got {copies}: use {low} copies,"
                f" {copies * (size // copies + 1)} ranks, or across='batch'"
            )
        self._groups = size // copies if across == "ranks" else size
        self._group = rank // copies if across == "ranks" else rank
        self._own = (rank % copies,) if across == "ranks" else tuple(range(copies))
        self._n = source if isinstance(source, int) else _length(source)
        if batch * self._groups > self._n:
            raise SpecError(
                f"batch must be in 1..{self._n // self._groups} for {self._n} examples among {self._groups}"
                f" groups of ranks, got {batch}"
            )
        self.batch, self.copies, self.across, self.seed = batch, copies, across, seed
        self._source, self._shuffle, self._size = source, shuffle, size
        self._next = (0, 0)

    @property
    def batch_size(self) -> int:
        """Inputs in a batch of this rank; `SpecError` with several ranks.

        Trainers such as Accelerate read it before they distribute batches again, after which ranks would not
        share examples.
        """
        if self._size > 1:
            raise SpecError(
                f"this loader distributes examples to {self._size} ranks itself, which share copies of each;"
                " a trainer would distribute its batches again: omit it from accelerator.prepare(...),"
                " and use Trainer(use_distributed_sampler=False) in Lightning"
            )
        return self.batch * len(self._own)

    @property
    def reading(self) -> Reading:
        each = self.batch * len(self._own)
        return Reading(inputs=each * self._size, distinct=self.batch * self._groups)

    @property
    def steps_per_epoch(self) -> int:
        return self._n // (self.batch * self._groups)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch and the first step of the next iteration."""
        arguments.whole("epoch", epoch)
        arguments.whole("start", start, 0, self.steps_per_epoch)
        self._next = (epoch, start)

    def __len__(self) -> int:
        return self.steps_per_epoch - self._next[1]

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, start = self._next  # not earlier: DataLoader creates iterators that it does not use
        self._next = (epoch + 1, 0)
        drawn = self._order(epoch).tolist()
        visits = repeat((), self._n) if isinstance(self._source, int) else _visits(drawn)
        mine = [*zip(drawn, visits, strict=True)][self._group :: self._groups]
        for step in range(start, self.steps_per_epoch):
            chosen = mine[step * self.batch : (step + 1) * self.batch]
            yield [Draw(i, c, mix(self.seed, epoch, i, c, *v)) for c in self._own for i, v in chosen]

    def _order(self, epoch: int) -> Tensor:
        key = mix(self.seed, epoch, COMMON)
        if isinstance(self._source, int):
            return (
                order(key, self._n)
                if self._shuffle
                else torch.arange(self._n, dtype=torch.int64, device="cpu")
            )
        if isinstance(self._source, DistributedSampler):
            self._source.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key >> 1)
            return torch.tensor([*self._source], dtype=torch.int64, device="cpu")


def _visits(drawn: Sequence[int]) -> Iterator[tuple[int, ...]]:
    seen: Counter[int] = Counter()
    for example in drawn:
        yield (seen[example],) if seen[example] else ()
        seen[example] += 1


def _length(sampler: Sampler[Any]) -> int:
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if isinstance(sampler, drawing) and sampler.generator is not None:
        raise SpecError(
            f"this {type(sampler).__name__} has its own generator, so that a resumed run would"
            " see another order: create it without generator=, and the order follows seed="
        )
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(
            f"batch augmentation needs a sampler with a length, and {type(sampler).__name__} has none: return"
            " the number of its examples per epoch from __len__"
        ) from None
