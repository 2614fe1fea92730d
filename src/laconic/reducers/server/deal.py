"""Deal: assignment of tensors, or of pieces of large ones, to serving ranks, with equal work.

Pieces have at least a quarter of a rank's share, limited to 1,024 to 16,384 elements. Cuts are at multiples
of 512 elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from laconic.comm.partition import BLOCK, Partition, piece
from laconic.core.layout import Entry, Layout

SHORTEST, LONG = 2 * BLOCK, 32 * BLOCK  # elements: a scale or a rounded-up count for each piece costs bytes


class Share(NamedTuple):
    """Elements [begin, end) of a tensor, which a rank serves."""

    rank: int
    begin: int
    end: int

    def of(self, entry: Entry) -> Entry:
        return entry if self.end - self.begin == entry.numel else piece(entry, self.begin, self.end)


Homes = Mapping[str, tuple[Share, ...]]  # shares by tensor


def homes(layout: Layout, size: int) -> Homes:
    """Assign shares: the largest tensor first, to the ranks with the fewest elements so far.

    >>> for name, shares in homes(Layout.of([("a", (40_000,)), ("b", (700,)), ("c", (600,))]), 2).items():
    ...     print(name, *map(tuple, shares))
    a (0, 0, 20480) (1, 20480, 40000)
    b (1, 0, 700)
    c (1, 0, 600)
    """
    least_numel = min(max(layout.numel // (4 * size), SHORTEST), LONG)
    loads = [0] * size
    dealt = {}
    for entry in sorted(layout, key=lambda entry: (-entry.numel, entry.name)):
        number = min(size, max(1, entry.numel // least_numel))
        least = sorted(range(size), key=lambda rank: (loads[rank], rank))[:number]
        blocks, more = divmod(-(-entry.numel // BLOCK), number)
        shares, begin = [], 0
        for rank in sorted(least):
            end = min(begin + BLOCK * (blocks + (rank in least[:more])), entry.numel)
            shares.append(Share(rank, begin, end))
            loads[rank] += end - begin
            begin = end
        dealt[entry.name] = tuple(shares)
    return dealt


def deal(bucket: Layout, homes: Homes, rank: int, size: int) -> Partition:
    parts: list[list[Entry]] = [[] for _ in range(size)]
    for entry in bucket:
        for share in homes[entry.name]:
            parts[share.rank].append(share.of(entry))
    return Partition.of(bucket, (Layout(tuple(part)) for part in parts), rank)
