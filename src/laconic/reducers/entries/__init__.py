"""Entries: some of a tensor's values with their positions.

A position counts elements of a bucket without gaps; an index, those of its segment. Both ascend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.messages import SentEntries
from laconic.core.framing import as_bytes, as_numbers, counts_bytes, moved, read_bytes, read_counts, sent_to
from laconic.core.layout import Segments
from laconic.core.selector import kept


@dataclass(frozen=True)
class Entries:
    """Indices int32 (K,) from their segment's start; counts int64 (s,), on the CPU; values float32 (K,)."""

    indices: Tensor
    counts: Tensor
    values: Tensor

    @classmethod
    def largest(cls, x: Tensor, segments: Segments, ks: Tensor) -> Entries:
        """Select the ks[i] largest nonzero |x| of each segment; among equals the lower index."""
        indices, counts = kernels.topk(x, segments, ks)
        return cls(indices, counts, kernels.gather(x, segments, indices, counts))

    def on(self, device: torch.device) -> Entries:
        indices, values = moved([self.indices, self.values.view(torch.int32)], device)
        return Entries(indices, self.counts, values.view(torch.float32))

    def positions(self, starts: Tensor) -> Tensor:
        return self.indices + kernels.per_index(starts, self.counts, self.indices.device)

    def where(self, wanted: Tensor) -> Entries:
        return Entries(self.indices[wanted], counted(wanted, self.counts), self.values[wanted])

    def among(self, ks: Tensor) -> Entries:
        segments = Segments.consecutive(self.counts.tolist())
        places, counts = kernels.topk(self.values, segments, ks)
        at = places + kernels.per_index(segments.starts_tensor, counts, places.device)
        return Entries(self.indices[at], counts, self.values[at])

    def wire(self, segments: Segments) -> Tensor:
        """Return the wire uint8: counts uint32 (s,), values float32 (K,), indices by `golomb`."""
        coded = kernels.rice_encode(self.indices, self.counts, segments)
        return torch.cat([sent_to(counts_bytes(self.counts), coded.device), as_bytes(self.values), coded])

    @classmethod
    def read(cls, wire: Tensor, segments: Segments) -> Entries:
        """Decode the `wire`; without segments ignore its bytes. Raises `WireError` if damaged."""
        counts, rest = read_counts(wire, segments)
        values, coded = read_bytes(rest, 4 * int(counts.sum()), "the values")
        indices = kernels.rice_decode(coded if len(segments) else coded[:0], counts, segments)
        return cls(indices, counts, as_numbers(values, torch.float32))

    def share(
        self, segments: Segments, positions: Tensor, final: Tensor, device: torch.device
    ) -> SentEntries:
        kept = self.where(contained(positions, final)).on(device)
        return SentEntries(segments, kept.indices, kept.counts, kept.values)


def positions_wire(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Return the wire uint8: counts uint32 (s,), then indices int32 (K,) by `golomb`."""
    coded = kernels.rice_encode(indices, counts, segments)
    return torch.cat([sent_to(counts_bytes(counts), coded.device), coded])


def positions_read(wire: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Invert `positions_wire`. Raises `WireError` if damaged."""
    counts, coded = read_counts(wire, segments)
    return kernels.rice_decode(coded, counts, segments), counts


def entries_nbytes(density: float, segments: Segments) -> int:
    """Return the most bytes of the wire of each segment's top-k entries."""
    kept_n = ((kept(density, n), n) for n in segments.sizes)
    return sum(4 + 4 * k + kernels.rice_bound(k, n) for k, n in kept_n)


def counted(mask: Tensor, counts: Tensor) -> Tensor:
    """Count each segment's entries in a mask bool (K,): int64 (s,), on the CPU.

    >>> counted(torch.tensor([True, False, True]), torch.tensor([2, 0, 1])).tolist()
    [1, 0, 1]
    """
    marked = torch.zeros(mask.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(mask.cpu(), 0, out=marked[1:])
    ends = counts.cumsum(0)
    return marked[ends] - marked[ends - counts]


def contained(positions: Tensor, ascending: Tensor) -> Tensor:
    """Return whether each position is in an ascending set, bool (K,).

    >>> contained(torch.tensor([1, 4, 9]), torch.tensor([0, 4])).tolist()
    [False, True, False]
    """
    if not ascending.numel():
        return torch.zeros_like(positions, dtype=torch.bool)
    at = torch.searchsorted(ascending, positions).clamp_(max=ascending.numel() - 1)
    return ascending[at] == positions
