# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Selection in Triton: x is read twice, once to count what reaches each level and once to write positions.

    levels    a program a segment    a threshold from its sample, and the lower ones that may be tried
    count     a program a tile       entries of the tile that reach each level
    pick      a program a segment    the first level that enough entries reach; where each tile writes
    compact   a program a tile       positions and values that reach the level, ascending
    trim      a program a segment    where more than k reach it, the k largest

The host waits once, for the numbers of entries, or leaves them on the GPU (`padded`). No program adds to
what another one wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.philox.gpu import block
from laconic.kernels.select.sample import Sampling, levels_of
from laconic.kernels.tiles import table, tiles
from laconic.kernels.upload import uploaded

TILE = 4096
STEP = 4096  # entries that one step of a program of a segment reads
BLOCK = 1024  # tiles, of which there are fewer
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
SPARE = 4096  # entries of room for candidates, besides those that are likely
Chosen = tuple[Tensor, Tensor]


@triton.jit
def _magnitude(x):
    """Return the bits of |x|, 0 for NaN."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(bits > INFINITY, 0, bits)


@triton.jit
def _kth_largest(x, first, stride, n, k, BLOCK: tl.constexpr):
    """Return the k-th largest magnitude of x[first + i * stride], i < n, and its rank among its equals."""
    digits = tl.arange(0, 256)
    found = 0
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for at in range(0, n, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            there = lane < n
            bits = _magnitude(tl.load(x + first + lane * stride, mask=there, other=0.0))
            if shift < 24:
                there = there & (((bits ^ found) >> (shift + 8)) == 0)
            counts += tl.histogram((bits >> shift) & 255, 256, mask=there)
        reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # with this digit or a higher one
        digit = tl.sum((reach >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        found = found | (digit << shift)
    return found, k


@triton.jit
def levels_kernel(
    x,
    levels,
    starts,
    keys,
    strides,
    samples,
    ranks,
    lower,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYED: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    rank = tl.load(ranks + segment)
    level = tl.where(rank < 0, MAGNITUDE, 1)
    if rank > 0:
        first, stride = tl.load(starts + segment), tl.load(strides + segment)
        if KEYED:
            word, _, _, _ = block(tl.load(keys + segment), segment * 0)
            first += (word.to(tl.int64) * stride) >> 32
        count = tl.load(samples + segment)
        level, _ = _kth_largest(x, first, stride, count, rank.to(tl.int32), BLOCK)
    value = level.to(tl.float32, bitcast=True)
    for j in tl.static_range(LEVELS - 1):
        bits = tl.where(rank > 0, value.to(tl.int32, bitcast=True), level)
        tl.store(levels + segment * LEVELS + j, tl.maximum(bits, 1))
        value = value * lower
    tl.store(levels + segment * LEVELS + LEVELS - 1, tl.where(rank < 0, MAGNITUDE, 1))


@triton.jit
def _tile(x, starts, sizes, segments, firsts, TILE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Return the segment of this program, the first of its elements, and these."""
    segment = tl.load(segments + tl.program_id(0)).to(tl.int64)
    first = tl.load(firsts + tl.program_id(0))
    start = tl.load(starts + segment) + first
    if ALIGNED:
        start = (start >> 2) * 4
    lane = tl.arange(0, TILE)
    if WHOLE:
        value = tl.load(x + start + lane)
    else:
        value = tl.load(x + start + lane, mask=lane < tl.load(sizes + segment) - first, other=0.0)
    return segment, first, value


@triton.jit(do_not_specialize=["num_tiles", "num_segments", "room"])
def count_kernel(
    x,
    levels,
    counts,
    rows,
    num_tiles,
    starts,
    sizes,
    segments,
    firsts,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    segment, first, value = _tile(x, starts, sizes, segments, firsts, TILE, ALIGNED, WHOLE)
    bits = _magnitude(value)
    out = counts + tl.load(rows + segment) + first // TILE
    for j in tl.static_range(0, LEVELS, 2):  # two counts in one sum: each is at most 4,096
        reach = (bits >= tl.load(levels + segment * LEVELS + j)).to(tl.int32)
        if j + 1 < LEVELS:
            reach += (bits >= tl.load(levels + segment * LEVELS + j + 1)).to(tl.int32) << 16
        total = tl.sum(reach, 0)
        tl.store(out + j * num_tiles, total & 0xFFFF)
        if j + 1 < LEVELS:
            tl.store(out + (j + 1) * num_tiles, total >> 16)


@triton.jit(do_not_specialize=["num_tiles", "num_segments", "room"])
def pick_kernel(
    levels,
    counts,
    num_tiles,
    rows,
    needs,
    ks,
    floors,
    totals,
    offsets,
    num_segments,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    row, end = tl.load(rows + segment), tl.load(rows + segment + 1)
    need = tl.load(needs + segment)
    chosen = LEVELS - 1
    for j in tl.static_range(LEVELS - 2, -1, -1):  # the first that enough reach, so the last that is set
        total = tl.zeros([BLOCK], tl.int32)
        for at in range(row, end, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            total += tl.load(counts + j * num_tiles + lane, mask=lane < end, other=0)
        chosen = tl.where(tl.sum(total.to(tl.int64), 0) >= need, j, chosen)
    tl.store(floors + segment, tl.load(levels + segment * LEVELS + chosen))
    found = 0
    for at in range(row, end, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        count = tl.load(counts + chosen * num_tiles + lane, mask=lane < end, other=0)
        tl.store(offsets + lane, found + tl.cumsum(count, 0) - count, mask=lane < end)
        found += tl.sum(count, 0)
    tl.store(totals + segment, found)
    tl.store(totals + num_segments + segment, tl.minimum(found, tl.load(ks + segment)))


@triton.jit(do_not_specialize=["num_tiles", "num_segments", "room"])
def compact_kernel(
    x,
    floors,
    totals,
    ends,
    offsets,
    rows,
    indices,
    values,
    room,
    starts,
    sizes,
    segments,
    firsts,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    segment, first, value = _tile(x, starts, sizes, segments, firsts, TILE, ALIGNED, WHOLE)
    reach = _magnitude(value) >= tl.load(floors + segment)
    before = tl.load(ends + segment) - tl.load(totals + segment)
    before += tl.load(offsets + tl.load(rows + segment) + first // TILE)
    at = before + tl.cumsum(reach.to(tl.int32), 0) - 1
    fits = reach & (at < room)
    tl.store(indices + at, (first + tl.arange(0, TILE)).to(tl.int32), mask=fits)
    tl.store(values + at, value, mask=fits)


@triton.jit(do_not_specialize=["num_tiles", "num_segments", "room"])
def trim_kernel(indices, values, totals, ends, num_segments, room, out, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    found, kept = tl.load(totals + segment), tl.load(totals + num_segments + segment)
    before = tl.load(ends + segment) - found
    to = tl.load(ends + num_segments + segment) - kept
    found = tl.where(tl.load(ends + num_segments - 1) > room, 0, found)
    least, left = 0, 0
    if found > kept:
        least, left = _kth_largest(values, before, 1, found, kept.to(tl.int32), BLOCK)
    ties = 0
    for at in range(0, found, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        there = lane < found
        bits = _magnitude(tl.load(values + before + lane, mask=there, other=0.0))
        tie = ((bits == least) & there).to(tl.int32)
        keep = (bits > least) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= left))
        place = tl.cumsum(keep.to(tl.int32), 0)
        index = tl.load(indices + before + lane, mask=there, other=0)
        tl.store(out + to + place - 1, index, mask=keep)
        to += tl.sum(keep.to(tl.int32), 0)
        ties += tl.sum(tie, 0)


@dataclass(frozen=True)
class Padded:
    """Selected entries that the host has not counted yet.

    indices: int32, those selected and room behind them. totals: int64 (2, s), entries of each segment that
    reach its threshold, and those selected. If more than `room` reach one, the indices mean nothing.
    """

    indices: Tensor
    totals: Tensor
    room: int


def topk(x: Tensor, segments: Segments, plan: Sampling) -> Chosen:
    """Select the largest |x| of each segment, exactly."""
    return _counted(lambda room: padded(x, segments, plan, None, 0.8, room))


def sampled_topk(x: Tensor, segments: Segments, plan: Sampling, keys: Tensor, lower: float) -> Chosen:
    """Select by a threshold from a sample of each segment, whose start follows from its key int64 (s,)."""
    drawn = uploaded(keys, x.device)
    return _counted(lambda room: padded(x, segments, plan, drawn, lower, room))


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    """Select |x| >= threshold, and not zero."""
    levels = uploaded(levels_of(threshold).view(-1, 1), x.device)
    plan, guess = _fixed(segments, x.device, 1, (0,) * len(segments), segments.sizes), segments.numel // 16
    return _counted(lambda room: _reaching(x, plan, levels, room or guess + SPARE))


def padded(
    x: Tensor, segments: Segments, sampling: Sampling, keys: Tensor | None, lower: float, room: int = 0
) -> Padded:
    """Select without a wait. Samples start where keys int64 (s,) on the device say, or at the first entry."""
    num = sampling.rounds + 2
    plan = _fixed(segments, x.device, num, sampling.needs, sampling.ks)
    levels = torch.empty((len(segments), num), dtype=torch.int32, device=x.device)
    if len(segments):
        columns = _columns(sampling, x.device)
        keyed = keys is not None
        tables = (plan.starts, keys if keyed else plan.starts, *columns, float(lower), num, STEP, keyed)
        with dispatch.device_of(x):
            launch(levels_kernel, (len(segments),), x, levels, *tables, num_warps=16)
    return _reaching(x, plan, levels, room or min(segments.numel, 16 * plan.most + SPARE))


def _counted(select: Callable[[int], Padded]) -> Chosen:
    """Return indices and counts, with one wait unless the room was too small."""
    chosen = select(0)
    read = chosen.totals.cpu()
    found, total = read.sum(1).tolist()
    if found > chosen.room:
        chosen = select(found)
    return chosen.indices[:total], read[1].clone()


def _reaching(x: Tensor, plan: Plan, levels: Tensor, room: int) -> Padded:
    """Select the ks largest of what reaches the first of the levels int32 (s, l) that `needs` reach."""
    device, s, tiles_of = x.device, plan.num, plan.num_tiles
    totals = torch.zeros((2, s), dtype=torch.int64, device=device)
    out = torch.empty(min(plan.most, room), dtype=torch.int32, device=device)
    if not tiles_of:
        return Padded(out[:0], totals, room)
    parts = [(size + 3) // 4 * 4 for size in (plan.levels * tiles_of, s, tiles_of, room, room)]
    scratch = torch.empty(sum(parts), dtype=torch.int32, device=device)
    counts, floors, offsets, indices, values = scratch.split_with_sizes(parts)
    values = values.view(torch.float32)
    with dispatch.device_of(x):
        for grid, tables, fixed in plan.launches:
            launch(count_kernel, grid, x, levels, counts, plan.rows, tiles_of, *tables, plan.levels, *fixed)
        chosen = (levels, counts, tiles_of, plan.rows, plan.needs, plan.ks, floors, totals, offsets, s)
        launch(pick_kernel, (s,), *chosen, plan.levels, BLOCK)
        ends = totals.cumsum(1)
        for grid, tables, fixed in plan.launches:
            written = (floors, totals, ends, offsets, plan.rows, indices, values, room)
            launch(compact_kernel, grid, x, *written, *tables, *fixed)
        launch(trim_kernel, (s,), indices, values, totals, ends, s, room, out, STEP // 2, num_warps=16)
    return Padded(out, totals, room)


@dataclass(frozen=True)
class Plan:
    """Tables of the segments on a device, and the launches for their whole tiles and for the last ones."""

    num: int
    num_tiles: int
    levels: int
    most: int  # entries that can be selected
    starts: Tensor
    rows: Tensor
    needs: Tensor
    ks: Tensor
    launches: tuple[tuple[Any, ...], ...]


@lru_cache(maxsize=256)
def _fixed(
    segments: Segments, device: torch.device, levels: int, needs: tuple[int, ...], ks: tuple[int, ...]
) -> Plan:
    sizes = segments.sizes
    starts = table(segments.starts, device)
    aligned = all(start % 4 == 0 for start in segments.starts)
    launches = tuple(
        ((len(part),), (starts, table(sizes, device), part.segment, part.first), (TILE, aligned, whole))
        for whole, part in zip((True, False), tiles(sizes, TILE, device), strict=True)
        if len(part)
    )
    rows = [0]
    for size in sizes:
        rows.append(rows[-1] + -(-size // TILE))
    most = sum(min(k, size) for k, size in zip(ks, sizes, strict=True))
    tables = (starts, table(tuple(rows), device), table(needs, device), table(ks, device))
    return Plan(len(sizes), rows[-1], levels, most, *tables, launches)


@lru_cache(maxsize=256)
def _columns(sampling: Sampling, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(table(each, device) for each in (sampling.strides, sampling.samples, sampling.ranks))
