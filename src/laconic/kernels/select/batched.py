"""Selection on a GPU without Triton: one wait of the host."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.select.sample import (
    MAGNITUDE,
    Sampling,
    levels_of,
    magnitudes,
    sample_tables,
)
from laconic.kernels.tiles import table

Chosen = tuple[Tensor, Tensor]


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    levels = levels_of(threshold).view(-1, 1).to(x.device, non_blocking=True)
    needs = (0,) * len(segments)
    return _reaching(magnitudes(_packed(x, segments)), segments, levels, needs, segments.sizes)


def sampled(x: Tensor, segments: Segments, plan: Sampling, offsets: Tensor | None, lower: float) -> Chosen:
    """Select by a threshold from samples that start at `offsets`."""
    bits = magnitudes(_packed(x, segments))
    level = _thresholds(bits, segments, plan, offsets)
    values = [level.view(torch.float32)]
    for _ in range(plan.rounds):
        values.append(values[-1] * lower)
    values.append(torch.zeros_like(values[0]))
    levels = torch.stack(values, 1).view(torch.int32).clamp_(min=1)
    levels = torch.where(level[:, None] == MAGNITUDE, MAGNITUDE, levels)
    return _reaching(bits, segments, levels, plan.needs, plan.ks)


def _packed(x: Tensor, segments: Segments) -> Tensor:
    views = segments.joined.views(x)
    return views[0] if len(views) == 1 else torch.cat(views) if views else x[:0]


def _thresholds(bits: Tensor, segments: Segments, plan: Sampling, offsets: Tensor | None) -> Tensor:
    places, of, at, fixed = sample_tables(segments.sizes, plan, bits.device)
    if not places.numel():
        return fixed
    if offsets is not None:
        places = places + offsets.to(bits.device, non_blocking=True)[of]
    keys = ((of << 31) | (MAGNITUDE - bits[places])).sort().values
    return torch.where(fixed > 0, fixed, (MAGNITUDE - (keys[at] & MAGNITUDE)).to(torch.int32))


def _reaching(
    bits: Tensor, segments: Segments, levels: Tensor, needs: tuple[int, ...], ks: tuple[int, ...]
) -> Chosen:
    device, (s, num) = bits.device, levels.shape
    positions, segment = _all_entries(segments.sizes, device)
    rows = torch.arange(s, dtype=torch.int64, device=device)[:, None] << 31
    keys = (rows | levels.flip(1)).flatten()
    slots = torch.searchsorted(keys, (segment << 31) | bits, right=True) + segment
    ones = torch.ones((), dtype=torch.int64, device=device).expand(len(slots))
    reached = torch.zeros(s * (num + 1), dtype=torch.int64, device=device).index_add_(0, slots, ones)
    counts = reached.view(s, num + 1).flip(1).cumsum(1)[:, :num]
    enough = (counts >= table(needs, device)[:, None]).to(torch.int32)
    enough[:, -1] = 1
    first = enough.argmax(1, keepdim=True)
    floors, found = levels.gather(1, first).flatten(), counts.gather(1, first).flatten()
    kept = torch.minimum(found, table(ks, device))
    read = torch.stack([found, kept]).cpu()
    candidates, total = (sum(row) for row in read.tolist())
    reach = bits >= floors[segment]
    positions = _where(reach, candidates, positions)
    each = segment
    segment = each[positions]
    if total < candidates:
        order = ((segment << 31) | (MAGNITUDE - bits[positions])).sort(stable=True).indices
        before = (found.cumsum(0) - found)[segment]
        keep = torch.arange(candidates, dtype=torch.int64, device=device) - before < kept[segment]
        keep = torch.empty_like(keep).scatter_(0, order, keep)
        positions = _where(keep, total, positions)
        segment = each[positions]
    starts = table(segments.packed.starts, device)
    return (positions - starts[segment]).to(torch.int32), read[1].clone()


def _where(mask: Tensor, count: int, values: Tensor) -> Tensor:
    """Return values where the mask is set; boolean indexing would make the host wait."""
    places = torch.where(mask, mask.cumsum(0) - 1, count)
    return values.new_empty(count + 1).scatter_(0, places, values)[:count]


@lru_cache(maxsize=8)
def _all_entries(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(sum(sizes), dtype=torch.int64, device=device)
    ends = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0).to(device)
    return positions, torch.searchsorted(ends, positions, right=True)
