"""Partition: a bucket's tensors, or pieces of them, divided among ranks that each reduce one part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from laconic.core.layout import Entry, Layout, Segments

BLOCK = 512  # elements: tensors are cut at multiples of it, which a quantiser's blocks do not cross


@dataclass(frozen=True)
class Partition:
    """A bucket in disjoint parts, one for each rank."""

    bucket: Layout
    parts: tuple[Layout, ...]  # of each rank, at the bucket's offsets
    home: Layout  # of this rank, one after the other from offset 0
    others: Layout  # of all other ranks in their order, at the bucket's offsets

    @classmethod
    def of(cls, bucket: Layout, parts: Iterable[Layout], rank: int) -> Partition:
        """Return the partition of the bucket into these parts, for `rank`."""
        parts = tuple(parts)
        others = (entry for r, part in enumerate(parts) if r != rank for entry in part)
        return cls(bucket, parts, packed(parts[rank]), Layout(tuple(others)))

    @cached_property
    def ranges(self) -> tuple[Segments, ...]:
        """Segments of each part."""
        return tuple(part.segments for part in self.parts)

    @cached_property
    def due(self) -> tuple[bool, ...]:
        """Whether each rank reduces at least one element."""
        return tuple(part.numel > 0 for part in self.parts)


def piece(entry: Entry, begin: int, end: int) -> Entry:
    """Return elements [begin, end) of a tensor, as a flat entry named "<tensor>[<begin>:<end>]"."""
    return Entry(f"{entry.name}[{begin}:{end}]", (end - begin,), entry.offset + begin)


def packed(*layouts: Layout) -> Layout:
    """Return the same entries one after the other from offset 0."""
    return Layout.of((entry.name, entry.shape) for layout in layouts for entry in layout)
