"""Split of sparse levels in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.entropy.reference import firsts_of
from laconic.kernels.entropy.reference import steps_of as distances_of
from laconic.kernels.entropy.tables import per_index, uploaded

FURTHEST = (1 << 31) - 1


def split_levels(levels: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    places = levels.nonzero().flatten()
    sizes = segments.sizes_tensor.numpy()
    ends = np.cumsum(sizes)
    counts = torch.searchsorted(places, uploaded(ends, places.device)).cpu()
    counts[1:] = counts.diff()
    kept = levels[places]
    starts = per_index(torch.from_numpy(ends - sizes), counts, places.device)
    return (places - starts).to(torch.int32), counts, kept.abs(), bitpack.pack_bits(kept < 0, 1)


def join_levels(
    indices: Tensor, counts: Tensor, magnitudes: Tensor, signs: Tensor, segments: Segments
) -> Tensor:
    places = indices + per_index(segments.packed.starts_tensor, counts, indices.device)
    negative = bitpack.unpack_bits(signs, 1, magnitudes.numel())
    levels = torch.zeros(segments.numel, dtype=torch.int32, device=indices.device)
    return levels.index_put_((places,), magnitudes * (1 - 2 * negative))


def places_of(steps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.cumsum(steps, 0, dtype=torch.int64)
    ends = pad(sums, (1, 0)).index_select(0, uploaded(np.cumsum(counts.numpy()), sums.device))
    before = pad(ends, (1, 0))[:-1]
    repeats = uploaded(counts.numpy(), sums.device)
    places = sums - 1 - torch.repeat_interleave(before, repeats, output_size=steps.numel())
    return places.clamp_(max=FURTHEST).to(torch.int32), (ends - before).cpu()


def steps_of(places: Tensor, counts: Tensor) -> Tensor:
    given = counts.numpy()
    firsts = uploaded(firsts_of(given[given > 0]), places.device)
    return distances_of(places, firsts).to(torch.int32)
