"""Cuts: every tensor in pieces of whole blocks of 512 elements, one piece per rank.

Cuts are made once for a model, independent of DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from laconic.comm.partition import BLOCK, Partition, piece
from laconic.core.layout import Entry, Layout

Cuts = Mapping[str, tuple[int, ...]]  # size + 1 bounds per tensor: rank r has [bounds[r], bounds[r + 1])


def cuts(layout: Layout, size: int) -> Cuts:
    """Cut each tensor of a model: equally many blocks per rank, one more to those with the fewest so far.

    >>> cuts(Layout.of([("a", (2000,)), ("b", (30, 30)), ("c", (7,))]), size=3)
    {'a': (0, 1024, 1536, 2000), 'b': (0, 0, 512, 900), 'c': (0, 0, 0, 7)}
    """
    loads = [0] * size
    made = {}
    for entry in sorted(layout, key=lambda entry: (-entry.numel, entry.name)):
        blocks, more = divmod(-(-entry.numel // BLOCK), size)
        least = sorted(range(size), key=lambda rank: (loads[rank], rank))[:more]
        bounds = [0]
        for rank in range(size):
            end = bounds[-1] + BLOCK * (blocks + (rank in least))
            bounds.append(min(end, entry.numel))
            loads[rank] += bounds[-1] - bounds[-2]
        made[entry.name] = tuple(bounds)
    return made


def cut(bucket: Layout, cuts: Cuts, rank: int) -> Partition:
    parts: list[list[Entry]] = [[] for _ in next(iter(cuts.values()), (0, 0))[1:]]
    for entry in bucket:
        for part, (begin, end) in zip(parts, pairwise(cuts[entry.name]), strict=True):
            if begin < end:
                part.append(piece(entry, begin, end))
    return Partition.of(bucket, (Layout(tuple(part)) for part in parts), rank)
