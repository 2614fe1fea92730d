"""Positions of tensors in a flat buffer, such as a bucket. A sub-layout has the same offsets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from laconic.core.errors import SpecError

T = TypeVar("T")

FEW = 4  # ranges; more are split in one call


@dataclass(frozen=True)
class Segments:
    """Ranges [start, start + size) of a flat buffer, in any order, not overlapping.

    Raises `ValueError` for a negative start or size, as native code writes there.

    >>> Segments((0, 4), (3, 2)).numel
    5
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if min((*self.starts, *self.sizes), default=0) < 0 or len(self.starts) != len(self.sizes):
            raise ValueError(
                "segments need as many starts as sizes, all >= 0, got starts"
                f" {self.starts[:4]} and sizes {self.sizes[:4]}"
            )

    @classmethod
    def whole(cls, n: int) -> Segments:
        return cls((0,), (n,))

    @classmethod
    def consecutive(cls, sizes: Iterable[int]) -> Segments:
        sizes = tuple(sizes)
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += size
        return cls(tuple(starts), sizes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.starts, self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.sizes, strict=True)

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def end(self) -> int:
        return max((start + size for start, size in self), default=0)

    @cached_property
    def starts_tensor(self) -> Tensor:
        return torch.tensor(self.starts, dtype=torch.int64, device="cpu")

    @cached_property
    def sizes_tensor(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.int64, device="cpu")

    @cached_property
    def packed(self) -> Segments:
        return Segments.consecutive(self.sizes)

    @cached_property
    def joined(self) -> Segments:
        """The same elements in the same order, with neighbours joined.

        >>> Segments((0, 3, 9), (3, 2, 1)).joined
        Segments(starts=(0, 9), sizes=(5, 1))
        """
        runs: list[list[int]] = []
        for start, size in self:
            if runs and runs[-1][0] + runs[-1][1] == start:
                runs[-1][1] += size
            else:
                runs.append([start, size])
        return Segments(tuple(run[0] for run in runs), tuple(run[1] for run in runs))

    @cached_property
    def merged(self) -> Segments:
        """The same elements, ascending, in the fewest ranges."""
        ranges = sorted(self)
        return Segments(tuple(start for start, _ in ranges), tuple(size for _, size in ranges)).joined

    @cached_property
    def _parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of gaps and ranges in memory order, and which are ranges; empty unless they ascend."""
        sizes: list[int] = []
        ranges, at = [], 0
        for start, size in self:
            if start < at:
                return (), ()
            sizes += [start - at, size] if start > at else [size]
            ranges.append(len(sizes) - 1)
            at = start + size
        return tuple(sizes), tuple(ranges)

    def views(self, x: Tensor) -> list[Tensor]:
        sizes, ranges = self._parts
        if len(self) < FEW or not ranges:
            return [x[start : start + size] for start, size in self]
        parts = x.split_with_sizes((*sizes, x.numel() - self.end))
        return [parts[i] for i in ranges]

    def gathered(self, x: Tensor) -> Tensor:
        """Return the concatenated ranges, copied unless there is one."""
        views = self.views(x)
        return views[0] if len(views) == 1 else torch.cat([x[:0], *views])

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        if factor != 1 and len(self):
            torch._foreach_mul_(self.merged.views(x), factor)
        return x

    def add_(self, x: Tensor, values: Tensor, alpha: float = 1) -> Tensor:
        joined = self.joined
        if len(joined) == 1:
            joined.views(x)[0].add_(values, alpha=alpha)
        elif len(joined):
            torch._foreach_add_(joined.views(x), torch.split(values, list(joined.sizes)), alpha=alpha)
        return x

    def zero_(self, x: Tensor) -> Tensor:
        if len(self):
            torch._foreach_zero_(self.merged.views(x))
        return x


@lru_cache(maxsize=512)
def apart(messages: tuple[Segments, ...]) -> bool:
    at = 0
    for start, size in sorted(pair for segments in messages for pair in segments if pair[1]):
        if start < at:
            return False
        at = start + size
    return True


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Named tensors of a flat buffer.

    >>> layout = Layout.of([("weight", (2, 3)), ("bias", (2,))])
    >>> layout.numel, layout["bias"].offset
    (8, 6)
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SpecError(f"names in a layout must be unique, got {twice[0]!r} twice")

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int]]]) -> Layout:
        entries, offset = [], 0
        for name, shape in tensors:
            entry = Entry(name, tuple(shape), offset)
            entries.append(entry)
            offset += entry.numel
        return cls(tuple(entries))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def segments(self) -> Segments:
        return Segments(
            tuple(entry.offset for entry in self.entries), tuple(entry.numel for entry in self.entries)
        )

    def named(self, names: Collection[str]) -> Layout:
        """Return these entries, at their old offsets."""
        wanted = frozenset(names)
        return self.where(lambda entry: entry.name in wanted)

    def where(self, wanted: Callable[[Entry], bool]) -> Layout:
        return Layout(tuple(entry for entry in self.entries if wanted(entry)))

    @cached_property
    def runs(self) -> Layout:
        """One flat entry per run of adjacent tensors, named after its first and last."""
        joined: list[list[Entry]] = []
        for entry in sorted(self.entries, key=lambda entry: entry.offset):
            if joined and joined[-1][-1].offset + joined[-1][-1].numel == entry.offset:
                joined[-1].append(entry)
            else:
                joined.append([entry])
        return Layout(
            tuple(
                Entry(
                    run[0].name if len(run) == 1 else f"{run[0].name}..{run[-1].name}",
                    (sum(entry.numel for entry in run),),
                    run[0].offset,
                )
                for run in joined
            )
        )


class PerLayout(Generic[T]):
    """Results cached per layout object.

    >>> halves = PerLayout(lambda layout: layout.numel // 2)
    >>> halves(Layout.of([("a", (4, 3))]))
    6
    """

    def __init__(self, make: Callable[[Layout], T]) -> None:
        self._make = make
        self._made: dict[int, tuple[Layout, T]] = {}

    def __call__(self, layout: Layout) -> T:
        known = self._made.get(id(layout))
        if known is None:
            known = self._made[id(layout)] = layout, self._make(layout)
        return known[1]

    def refresh(self, make: Callable[[Layout, T], T]) -> None:
        self._made = {key: (layout, make(layout, known)) for key, (layout, known) in self._made.items()}

    def clear(self) -> None:
        self._made.clear()
