"""Levels apart from their zeros in plain torch: what the native kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack

FURTHEST = (1 << 31) - 1  # a place is an int32


def split_levels(levels: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions int32 (K,), their counts int64 (s,), magnitudes int32 (K,) and packed signs."""
    places = levels.nonzero().flatten()
    ends = torch.cumsum(segments.sizes_tensor, 0)
    owner = torch.searchsorted(ends.to(places.device), places, right=True)
    starts = (ends - segments.sizes_tensor).to(places.device)
    counts = torch.bincount(owner, minlength=len(segments)).cpu()
    kept = levels[places]
    return (places - starts[owner]).to(torch.int32), counts, kept.abs(), bitpack.pack_bits(kept < 0, 1)


def join_levels(
    indices: Tensor, counts: Tensor, magnitudes: Tensor, signs: Tensor, segments: Segments
) -> Tensor:
    """The inverse, int32 (N,)."""
    starts = torch.cumsum(segments.sizes_tensor, 0) - segments.sizes_tensor
    places = indices.to(torch.int64) + torch.repeat_interleave(starts, counts).to(indices.device)
    negative = bitpack.unpack_bits(signs, 1, magnitudes.numel())
    levels = torch.zeros(segments.numel, dtype=torch.int32, device=indices.device)
    return levels.index_put_((places,), magnitudes * (1 - 2 * negative))


def places_of(steps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums less one in each range, int32 (K,), and whole sums int64 (s,) on the CPU."""
    sums = torch.cumsum(steps, 0, dtype=torch.int64)
    ends = torch.cat([sums.new_zeros(1), sums])[torch.cumsum(counts, 0).to(sums.device)]
    before = torch.cat([ends.new_zeros(1), ends])[:-1]
    places = sums - 1 - torch.repeat_interleave(before, counts.to(sums.device))
    return places.clamp_(max=FURTHEST).to(torch.int32), (ends - before).cpu()


def steps_of(places: Tensor, counts: Tensor) -> Tensor:
    """Differences in each range, the first from -1, int32 (K,)."""
    steps = torch.diff(places, prepend=places.new_full((1,), -1))
    firsts = (torch.cumsum(counts, 0) - counts)[counts > 0].to(places.device)
    steps[firsts] = places[firsts] + 1
    return steps
