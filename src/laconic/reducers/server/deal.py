"""Dealing tensors to ranks: which rank serves which."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from laconic.comm.partition import Partition
from laconic.core.layout import Layout


def homes(layout: Layout, size: int) -> dict[str, int]:
    """The rank that serves each tensor: the largest first, each to the rank with the fewest elements.

    >>> homes(Layout.of([("a", (6,)), ("b", (5,)), ("c", (4,)), ("d", (2,))]), size=2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [(0, rank) for rank in range(size)]
    dealt: dict[str, int] = {}
    for entry in sorted(layout, key=lambda entry: (-entry.numel, entry.name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + entry.numel, rank))
        dealt[entry.name] = rank
    return dealt


def deal(bucket: Layout, homes: Mapping[str, int], rank: int, size: int) -> Partition:
    """The bucket's tensors dealt to the ranks that serve them, as `rank` of `size` sees it."""
    names: list[list[str]] = [[] for _ in range(size)]
    for name in bucket.names:
        names[homes[name]].append(name)
    return Partition.of(bucket, map(bucket.named, names), rank)
