"""Bins: a bucket's tensors, the large ones cut in pieces, packed in bins of near-equal work, one a rank.

The layout's half of DEFT (`deft`), which is the same at every step, and how many entries each piece may send.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Layout, Segments
from laconic.reducers.union import Found, Parts, part_of


@dataclass(frozen=True)
class Bins:
    """Pieces of a flat buffer, and the numbers of those in each bin, ascending."""

    pieces: Segments
    bins: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, size: int) -> Bins:
        """A tensor of more than n / size elements in `size` near-equal pieces, any other in one.

        The largest piece first, each to the bin with the fewest elements (LPT, Graham 1969).

        >>> Bins.of(Layout.of([("a", (5,)), ("b", (2,)), ("c", (1,))]), size=2)
        Bins(pieces=Segments(starts=(0, 3, 5, 7), sizes=(3, 2, 2, 1)), bins=((0, 3), (1, 2)))
        """
        cuts: list[tuple[int, int]] = []
        for entry in layout:
            n = entry.numel
            number = min(n, size if n * size > layout.numel else 1)
            if n:
                short, longer = divmod(n, number)  # the first `longer` pieces have one more
                borders = [short * i + min(i, longer) for i in range(number + 1)]
                cuts += [(entry.offset + a, b - a) for a, b in pairwise(borders)]
        loads = [(0, home) for home in range(size)]
        bins: list[list[int]] = [[] for _ in range(size)]
        for piece in sorted(range(len(cuts)), key=lambda piece: (-cuts[piece][1], piece)):
            load, home = loads[0]
            heapq.heapreplace(loads, (load + cuts[piece][1], home))
            bins[home].append(piece)
        starts, sizes = tuple(start for start, _ in cuts), tuple(n for _, n in cuts)
        return cls(Segments(starts, sizes), tuple(tuple(sorted(each)) for each in bins))

    @property
    def size(self) -> int:
        """How many bins there are, and ranks."""
        return len(self.bins)

    @cached_property
    def parts(self) -> Parts:
        """The pieces of each bin."""
        return Parts(tuple(self._at(each) for each in self.bins))

    @cached_property
    def order(self) -> Tensor:
        """The numbers of the pieces in the order of `parts.joined`, int64 (L,)."""
        return torch.tensor([piece for each in self.bins for piece in each], dtype=torch.int64)

    def norms(self, x: Tensor, rank: int, step: int) -> Tensor:
        """The l2 norms of every N-th piece of flat x, float32: from another one on at each step and rank."""
        return kernels.norms(x, self._measured[part_of(rank, step, self.size)], norm="l2")

    def measured(self, rank: int, step: int) -> int:
        """How many norms a rank measures at this step."""
        return len(self._measured[part_of(rank, step, self.size)])

    def all_norms(self, told: Sequence[Tensor], step: int) -> list[float]:
        """The norms of all pieces from those that each rank has measured."""
        norms = [0.0] * len(self.pieces)
        for rank, values in enumerate(told):
            norms[part_of(rank, step, self.size) :: self.size] = values.tolist()
        return norms

    def select(self, x: Tensor, ks: Tensor, rank: int, step: int) -> Found:
        """The ks largest |x| of each piece in this rank's bin; none of a piece that all send in full."""
        home = part_of(rank, step, self.size)
        own, segments = ks[list(self.bins[home])], self.parts[home]
        return kernels.topk(x, segments, torch.where(own == segments.sizes_tensor, 0, own))

    @cached_property
    def _measured(self) -> tuple[Segments, ...]:
        """Which pieces are measured together."""
        every = range(len(self.pieces))
        return tuple(self._at(every[first :: self.size]) for first in range(self.size))

    def _at(self, chosen: Sequence[int]) -> Segments:
        starts, sizes = self.pieces.starts, self.pieces.sizes
        return Segments(tuple(starts[i] for i in chosen), tuple(sizes[i] for i in chosen))


def allot(norms: Sequence[float], sizes: Sequence[int], k: int) -> list[int]:
    """How many of k entries each piece may send: in proportion to its norm, and no more than it has.

    A piece whose share is more than all of it is sent in full, and the others share the rest. The share of
    each, from the largest norm to the smallest, is rounded down, but to no less than 1, as long as entries
    are left: so they add up to k, wherever the pieces of norms above 0 have as many.

    >>> allot([8.0, 4.0, 4.0, 0.0], [1000, 1000, 3, 9], 23)
    [13, 7, 3, 0]
    """
    shares = [0] * len(sizes)
    left = k
    first = sorted((piece for piece, q in enumerate(norms) if q > 0), key=lambda i: sizes[i] / norms[i])
    sums = _sums_from(first, norms)
    full = 0
    while full < len(first) and sizes[first[full]] * sums[full] <= left * norms[first[full]]:
        shares[first[full]] = sizes[first[full]]
        left -= sizes[first[full]]
        full += 1
    largest = sorted(first[full:], key=lambda i: (-norms[i], i))
    for piece, total in zip(largest, _sums_from(largest, norms), strict=True):
        shares[piece] = min(sizes[piece], left, max(1, int(left * norms[piece] / total)))
        left -= shares[piece]
    return shares


def _sums_from(pieces: Sequence[int], norms: Sequence[float]) -> list[float]:
    """The sum of the norms of each piece and those behind it."""
    total, sums = 0.0, []
    for piece in reversed(pieces):
        total += norms[piece]
        sums.append(total)
    return sums[::-1]
