"""Partition of a bucket's tensors among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from laconic.core.layout import Entry, Layout, Segments

BLOCK = 512  # elements; a cut at its multiples crosses no quantiser's block


@dataclass(frozen=True)
class Parts:
    """Tensors by rank."""

    layouts: tuple[Layout, ...]

    @cached_property
    def together(self) -> Layout:
        return Layout(tuple(entry for part in self.layouts for entry in part))

    @cached_property
    def ranges(self) -> tuple[Segments, ...]:
        return tuple(part.segments for part in self.layouts)


@dataclass(frozen=True)
class Partition:
    bucket: Layout
    parts: tuple[Layout, ...]  # per rank, at the bucket's offsets
    home: Layout  # of this rank, from offset 0
    to_others: Parts  # those of other ranks; this rank's is empty

    @classmethod
    def of(cls, bucket: Layout, parts: Iterable[Layout], rank: int) -> Partition:
        parts = tuple(parts)
        to_others = tuple(Layout(()) if r == rank else part for r, part in enumerate(parts))
        return cls(bucket, parts, packed(parts[rank]), Parts(to_others))

    @cached_property
    def to_all(self) -> Parts:
        return Parts(self.parts)

    @cached_property
    def due(self) -> tuple[bool, ...]:
        return tuple(part.numel > 0 for part in self.parts)


def piece(entry: Entry, begin: int, end: int) -> Entry:
    """Return elements [begin, end) of a tensor, as a flat entry named "<tensor>[<begin>:<end>]"."""
    return Entry(f"{entry.name}[{begin}:{end}]", (end - begin,), entry.offset + begin)


def packed(*layouts: Layout) -> Layout:
    return Layout.of((entry.name, entry.shape) for layout in layouts for entry in layout)
