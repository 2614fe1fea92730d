"""Exact global top-k of sums scattered over ranks: steps 3 to 6 of `oktopk`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import sent_by
from laconic.comm.skippable import gather_or_skip
from laconic.core.framing import moved, read_bytes, sent_to
from laconic.core.layout import Segments
from laconic.reducers.entries import Entries, contained, counted
from laconic.reducers.oktopk.regions import Regions

NOTHING, SMALL, ANY = 0, 1, 2  # held-back entries of a piece: none; only below the threshold; maybe above it


def global_topk(
    wires: list[Tensor],
    regions: Regions,
    ks: Tensor,
    thresholds: Tensor,
    comm: Comm,
    device: torch.device,
) -> tuple[Tensor, Entries, Tensor]:
    """Return the ks[i] largest |1/N * sum over ranks| of each tensor; `wires`: each rank's for this region.

    Returns positions int64 (K,) in the bucket, the same entries by tensor, and each tensor's least |value|,
    float32 (s,).
    """
    here, pieces = regions.at(comm.rank), regions.pieces[comm.rank]
    tensors = regions.tensor_of[here]
    sums, chosen = added(moved(wires, ks.device), pieces)
    least = torch.minimum(-(-chosen // comm.size), ks[tensors])
    most = torch.minimum(-(-2 * chosen // comm.size) + 4, ks[tensors])
    given, held = offer(sums, least, most, thresholds[tensors], ks[tensors])
    received, all_held = exchanged(given, held, regions, comm, device)
    best = received.best(ks)
    missing = received.doubtful(best, all_held, thresholds)
    if bool(missing.any()):
        floors = kernels.per_index(best.floors[tensors], sums.counts, sums.values.device)
        starts = pieces.starts_tensor
        rest = (sums.values.abs() >= floors) & ~contained(sums.positions(starts), given.positions(starts))
        left = (ks[tensors] - given.counts) * missing[here]  # the given entries are the largest
        more, _ = exchanged(sums.where(rest).among(left), held, regions, comm, device)
        best = received.plus(more).best(ks)
    return best.positions, best.entries(regions.tensors), best.floors


def added(wires: list[Tensor], pieces: Segments) -> tuple[Entries, Tensor]:
    """Return 1/N * the sum of N ranks' entries, in rank order, and counts per piece, int64 (s,)."""
    parts = []
    for rank, wire in enumerate(wires):
        with sent_by(rank):
            parts.append(Entries.read(wire, pieces))
    order, places = torch.unique(
        torch.cat([part.positions(pieces.starts_tensor) for part in parts]), return_inverse=True
    )
    sums = torch.zeros(order.numel(), dtype=torch.float32, device=order.device)
    for part, where in zip(parts, places.split([part.values.numel() for part in parts]), strict=True):
        sums.index_add_(0, where, part.values * (1 / len(parts)))
    ends = sent_to(
        torch.tensor([*pieces.starts, pieces.numel], dtype=torch.int64, device="cpu"), order.device
    )
    counts = torch.searchsorted(order, ends).diff()
    starts = kernels.per_index(pieces.starts_tensor, counts, order.device)
    chosen = torch.stack([part.counts for part in parts]).sum(dim=0)
    return Entries((order - starts).to(torch.int32), counts, sums), chosen


def offer(
    sums: Entries, least: Tensor, most: Tensor, thresholds: Tensor, ks: Tensor
) -> tuple[Entries, Tensor]:
    """Return the largest of each piece above its threshold, `least` to `most`, and marks of the rest."""
    top = sums.among(most)
    reach = top.values.abs() >= kernels.per_index(thresholds, top.counts, top.values.device)
    passing = counted(reach, top.counts)
    counts = torch.maximum(passing, torch.minimum(least, top.counts))
    more = (top.counts == most) & (most < ks)  # possibly more than `top` has
    held = torch.where(more | (counts < top.counts), SMALL, NOTHING)
    held = torch.where(more & (passing == top.counts), ANY, held)
    return top.among(counts), held


def exchanged(
    given: Entries, held: Tensor, regions: Regions, comm: Comm, device: torch.device
) -> tuple[Pool, Tensor]:
    own = torch.cat([held.to(torch.uint8), given.wire(regions.pieces[comm.rank])])
    messages = gather_or_skip(comm, sent_to(own, device), device)
    assert messages is not None, "the first messages have shown that all are finite"
    parts, all_held = [], []
    for rank, (message, pieces) in enumerate(zip(moved(messages, own.device), regions.pieces, strict=True)):
        with sent_by(rank):
            head, wire = read_bytes(message, len(pieces), "the marks of held-back pieces")
            parts.append(Entries.read(wire, pieces))
        all_held.append(head.to(torch.int64))
    return Pool(regions, *regions.join(parts)), torch.cat(all_held)


@dataclass(frozen=True)
class Best:
    places: Tensor
    counts: Tensor
    positions: Tensor
    values: Tensor
    floors: Tensor  # least |value| of each tensor float32 (s,), 0 below the requested number

    def entries(self, tensors: Segments) -> Entries:
        starts = kernels.per_index(tensors.starts_tensor, self.counts, self.positions.device)
        return Entries((self.positions - starts).to(torch.int32), self.counts, self.values)


@dataclass(frozen=True)
class Pool:
    """Entries from all ranks: positions int64 (K,), ascending, counts int64 (p,), values float32 (K,)."""

    regions: Regions
    positions: Tensor
    counts: Tensor
    values: Tensor

    def best(self, ks: Tensor) -> Best:
        tensors = Segments.consecutive(self.regions.per_tensor(self.counts).tolist())
        top = Entries.largest(self.values, tensors, ks)
        places = top.positions(tensors.starts_tensor)
        tensor = torch.repeat_interleave(
            torch.arange(len(tensors), dtype=torch.int64, device="cpu"), top.counts
        )
        floors = torch.full((len(tensors),), torch.inf, dtype=torch.float32, device="cpu")
        floors.scatter_reduce_(0, tensor, top.values.abs(), "amin")
        floors[(top.counts < ks) | (ks == 0)] = 0.0
        return Best(places, top.counts, self.positions[places], top.values, floors)

    def doubtful(self, best: Best, held: Tensor, thresholds: Tensor) -> Tensor:
        """Return bool (p,): pieces in which a held-back entry may belong to the best.

        Received entries exceed held-back ones, so all received ones of such a piece are among the best.
        """
        kept = torch.zeros_like(self.positions, dtype=torch.bool)
        kept[best.places] = True
        low = (best.floors < thresholds)[self.regions.tensor_of]  # then entries below the threshold matter
        return (counted(kept, self.counts) == self.counts) & ((held == ANY) | ((held == SMALL) & low))

    def plus(self, other: Pool) -> Pool:
        positions, order = torch.cat([self.positions, other.positions]).sort()
        values = torch.cat([self.values, other.values])[order]
        return Pool(self.regions, positions, self.counts + other.counts, values)
