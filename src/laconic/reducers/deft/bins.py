"""Bins: tensors of a bucket, large ones cut, in one bin of near-equal work per rank."""

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
from laconic.reducers.deft.union import Found, Parts, part_of


@dataclass(frozen=True)
class Bins:
    """Pieces of a flat buffer, and the ascending numbers of the pieces in each bin."""

    pieces: Segments
    bins: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, size: int) -> Bins:
        """Cut tensors of more than n / size elements into `size` near-equal pieces, and pack them by LPT
        (Graham 1969): the largest piece first, each to the emptiest bin.

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
        return len(self.bins)

    @cached_property
    def parts(self) -> Parts:
        return Parts(tuple(self._at(each) for each in self.bins))

    @cached_property
    def order(self) -> Tensor:
        """Numbers of the pieces in the order of `parts.joined`, int64 (L,)."""
        return torch.tensor([piece for each in self.bins for piece in each], dtype=torch.int64, device="cpu")

    def norms(self, x: Tensor, rank: int, step: int) -> Tensor:
        """Return float32 l2 norms of every N-th piece of flat x, from one that varies with step and rank."""
        return kernels.norms(x, self._measured[part_of(rank, step, self.size)], kernels.Measure("l2"))

    def measured(self, rank: int, step: int) -> int:
        return len(self._measured[part_of(rank, step, self.size)])

    def all_norms(self, measured: Sequence[Tensor], step: int) -> Tensor:
        norms = torch.zeros(len(self.pieces), dtype=torch.float32, device="cpu")
        for rank, values in enumerate(measured):
            norms[part_of(rank, step, self.size) :: self.size] = values
        return norms

    def select(self, x: Tensor, ks: Tensor, rank: int, step: int) -> Found:
        """Return the ks largest |x| of each piece in this rank's bin; none of a full piece."""
        home = part_of(rank, step, self.size)
        own, segments = ks[list(self.bins[home])], self.parts[home]
        return kernels.topk(x, segments, torch.where(own == segments.sizes_tensor, 0, own))

    @cached_property
    def _measured(self) -> tuple[Segments, ...]:
        every = range(len(self.pieces))
        return tuple(self._at(every[first :: self.size]) for first in range(self.size))

    def _at(self, chosen: Sequence[int]) -> Segments:
        starts, sizes = self.pieces.starts, self.pieces.sizes
        return Segments(tuple(starts[i] for i in chosen), tuple(sizes[i] for i in chosen))


def allot(norms: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Return how many of k entries each piece may send, int64 (L,): by its norm, up to its size.

    A piece whose share reaches its size is sent in full, and the others share the rest: by decreasing norm,
    shares of at least one are rounded to integers that add up, others to 1 while entries are left. Float64
    in a fixed order gives the same on all ranks.

    >>> allot(torch.tensor([8.0, 4.0, 4.0, 0.0]), torch.tensor([1000, 1000, 3, 9]), 23).tolist()
    [13, 7, 3, 0]
    """
    norms, shares = norms.double(), torch.zeros_like(sizes)
    first = torch.where(norms > 0, sizes / norms, torch.inf).sort(stable=True).indices
    first = first[norms[first] > 0]
    q, n = norms[first], sizes[first]
    left = k - (n.cumsum(0) - n)  # if all earlier pieces are sent in full
    full = first[: int((n * _sums_from(q) <= left * q).cumprod(0).sum())]
    shares[full] = sizes[full]
    k -= int(sizes[full].sum())
    largest = norms.sort(descending=True, stable=True).indices
    rest = largest[(norms[largest] > 0) & (shares[largest] == 0)]
    sums = norms[rest].cumsum(0)
    whole = rest[: int((k * norms[rest] >= sums[-1:]).sum())]
    ends = (k * (sums[: len(whole)] / sums[-1:])).long()
    shares[whole] = torch.minimum(ends.diff(prepend=ends.new_zeros(1)), sizes[whole])
    shares[rest[len(whole) :][: k - int(ends[-1:].sum())]] = 1
    return shares


def _sums_from(q: Tensor) -> Tensor:
    return q.flip(0).cumsum(0).flip(0)
