"""Selection by the bits of |x|: as integers these have the order of |x|, even of denormals in any flush mode.

On a CPU, numpy sorts and partitions several times as fast as torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.philox import reference as philox
from laconic.kernels.select import batched
from laconic.kernels.select.sample import INFINITY, MAGNITUDE, Sampling, levels_of, sample_tables

Chosen = tuple[Tensor, Tensor]
Ints = np.ndarray[Any, np.dtype[Any]]


def topk(x: Tensor, segments: Segments, plan: Sampling) -> Chosen:
    return sampled_topk(x, segments, plan, None, 0.8)


def sampled_topk(
    x: Tensor, segments: Segments, plan: Sampling, offsets: Tensor | None, lower: float
) -> Chosen:
    if not x.is_cpu:
        return batched.sampled(x, segments, plan, offsets, lower)
    bits, sizes = _bits(x, segments), np.array(segments.sizes, dtype=np.int64)
    needs = np.array(plan.needs, dtype=np.int64)
    levels = _levels(_thresholds(bits, segments, plan, offsets), lower, plan.rounds)
    likely = min(2, plan.rounds) if 16 * sum(plan.ks) < segments.numel else 0
    entries = _collect(bits, sizes, levels[likely])
    floors, found = _pick(entries, levels[: likely + 1], needs)
    short = (found < needs) & (floors > 1)
    if short.any():
        levels = [np.where(short, level, floors) for level in levels]
        entries = _collect(bits, sizes, levels[-1])
        floors, found = _pick(entries, levels, needs)
    return _largest(entries, floors, found, segments, plan.ks)


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    if not x.is_cpu:
        return batched.above(x, segments, threshold)
    floors = levels_of(threshold).numpy()
    entries = _collect(_bits(x, segments), np.array(segments.sizes, dtype=np.int64), floors)
    return _largest(entries, floors, entries.counts, segments, segments.sizes)


@dataclass(frozen=True)
class Entries:
    """Entries that reach a level: ascending packed positions, bits, counts by segment."""

    positions: Ints
    bits: Ints
    counts: Ints


def _bits(x: Tensor, segments: Segments) -> Ints:
    views = segments.joined.views(x)
    packed = views[0] if len(views) == 1 else torch.cat(views) if views else x[:0]
    return (packed.view(torch.int32) & MAGNITUDE).numpy()


def _thresholds(bits: Ints, segments: Segments, plan: Sampling, offsets: Tensor | None) -> Ints:
    tables = sample_tables(segments.sizes, plan, torch.device("cpu"))
    places, of, at, fixed = (each.numpy() for each in tables)
    if not len(places):
        return fixed
    if offsets is not None:
        places = places + np.repeat(
            offsets.numpy(), [m if r > 0 else 0 for m, r in zip(plan.samples, plan.ranks, strict=True)]
        )
    sample = bits[places]
    sample[sample > INFINITY] = 0
    keys = np.sort((of << 31) | (MAGNITUDE - sample))
    return np.where(fixed > 0, fixed, MAGNITUDE - (keys[at] & MAGNITUDE)).astype(np.int32)


def _levels(level: Ints, lower: float, rounds: int) -> list[Ints]:
    """Return the levels t, t lower, ..., t lower^rounds, and 1."""
    values = [level.view(np.float32)]
    for _ in range(rounds):
        values.append(values[-1] * np.float32(lower))
    values.append(np.zeros_like(values[0]))
    never = level == MAGNITUDE
    return [np.where(never, level, np.maximum(value.view(np.int32), 1)) for value in values]


def _collect(bits: Ints, sizes: Ints, floors: Ints) -> Entries:
    reach = bits >= (floors[0] if len(sizes) == 1 else np.repeat(floors, sizes))
    positions = np.flatnonzero(reach)
    found = bits[positions]
    if (nan := found > INFINITY).any():
        positions, found = positions[~nan], found[~nan]
    counts = np.diff(np.searchsorted(positions, np.cumsum(sizes)), prepend=0)
    return Entries(positions, found, counts)


def _pick(entries: Entries, levels: list[Ints], needs: Ints) -> tuple[Ints, Ints]:
    """Return the first level that enough entries reach, else the last; and how many do."""
    floors, found = levels[-1].copy(), entries.counts.copy()
    left = np.ones(len(needs), dtype=np.bool_)
    for level in levels[:-1]:
        if not left.any() or (level == levels[-1]).all():
            break
        counts = _counts(entries.bits >= np.repeat(level, entries.counts), entries.counts)
        now = left & (counts >= needs)
        floors[now], found[now] = level[now], counts[now]
        left &= ~now
    return floors, found


def _counts(mask: Any, counts: Ints) -> Ints:
    sums: Ints = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask, dtype=np.int64)])
    ends = np.cumsum(counts)
    found: Ints = sums[ends] - sums[ends - counts]
    return found


def _largest(entries: Entries, floors: Ints, found: Ints, segments: Segments, ks: tuple[int, ...]) -> Chosen:
    kept = np.minimum(found, np.array(ks, dtype=np.int64))
    positions, counts = entries.positions, entries.counts
    if kept.sum() < len(positions):
        least = floors.copy()
        ends = np.cumsum(counts)
        for i in np.flatnonzero(kept < found):
            part, k = entries.bits[ends[i] - counts[i] : ends[i]], kept[i]
            least[i] = np.partition(part, len(part) - k)[len(part) - k] if k else MAGNITUDE
        keep = entries.bits >= np.repeat(least, counts)
        for i in np.flatnonzero(_counts(keep, counts) > kept):
            part = entries.bits[ends[i] - counts[i] : ends[i]]
            room = kept[i] - np.count_nonzero(part > least[i])
            keep[ends[i] - counts[i] + np.flatnonzero(part == least[i])[room:]] = False
        positions = positions[keep]
    if len(kept) > 1:
        positions = positions - np.repeat(np.array(segments.packed.starts, dtype=np.int64), kept)
    return _tensor(positions, torch.int32), _tensor(kept, torch.int64)


def _tensor(values: Ints, dtype: torch.dtype) -> Tensor:
    """Convert to a tensor; `from_numpy` would give a single value stride 0."""
    made = torch.empty(len(values), dtype=dtype, device="cpu")
    made.numpy()[:] = values
    return made


FEISTEL_ROUNDS = 12


def _mixed(word: Tensor) -> Tensor:
    """Apply MurmurHash3's finaliser."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & philox.LOW
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & philox.LOW
    return word ^ (word >> 16)


def permuted(position: Tensor, key: int, n: int) -> Tensor:
    """Permute [0, n) by a Feistel network, repeated until below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    round_keys = philox.words(key, FEISTEL_ROUNDS).tolist()

    def once(value: Tensor) -> Tensor:
        left, right = value >> half, value & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mixed((right + round_key) & philox.LOW) & mask)
        return (left << half) | right

    value = once(position)
    while bool((outside := value >= n).any()):
        value = torch.where(outside, once(value), value)
    return value


def random_indices(sizes: Tensor, ks: Tensor, keys: Tensor) -> Chosen:
    def part(n: int, k: int, key: int) -> Tensor:
        if k <= 0 or n <= 0:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if k >= n:
            return torch.arange(n, dtype=torch.int64, device="cpu")
        return permuted(torch.arange(k, dtype=torch.int64, device="cpu"), key, n).sort().values

    rows: Iterable[tuple[int, int, int]] = zip(sizes.tolist(), ks.tolist(), keys.tolist(), strict=True)
    parts = [part(*row) for row in rows]
    indices = torch.cat(
        [torch.empty(0, dtype=torch.int32, device="cpu"), *(each.to(torch.int32) for each in parts)]
    )
    return indices, torch.tensor([each.numel() for each in parts], dtype=torch.int64, device="cpu")
