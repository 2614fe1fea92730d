# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Selection in Triton: x is read twice, once to count what reaches each level and once to write positions.

    levels    a program a segment    a threshold from its sample, and the lower ones that may be tried
    count     a program a tile       entries of the tile that reach each level
    pick      a program a segment    the first level that enough entries reach; where each tile writes
    compact   a program a tile       positions and values that reach the level, ascending
    trim      a program a segment    where more than k reach it, the k largest

The host waits once, for the number of entries. No program adds to what another one wrote.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.select.sample import Sampling, levels_of
from laconic.kernels.tiles import table, tiles
from laconic.kernels.upload import uploaded

TILE = 4096
STEP = 4096  # entries that one step of a program of a segment reads
BLOCK = 1024  # tiles, of which there are fewer
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
WIDE: dict[str, Any] = {**OPTIONS, "num_warps": 16}  # of programs that read a whole segment
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
    x, levels, starts, offsets, strides, samples, ranks, lower, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    segment = tl.program_id(0).to(tl.int64)
    rank = tl.load(ranks + segment)
    level = tl.where(rank < 0, MAGNITUDE, 1)
    if rank > 0:
        first = tl.load(starts + segment) + tl.load(offsets + segment)
        count = tl.load(samples + segment)
        level, _ = _kth_largest(x, first, tl.load(strides + segment), count, rank.to(tl.int32), BLOCK)
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


@triton.jit
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


@triton.jit
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


@triton.jit
def compact_kernel(
    x,
    floors,
    totals,
    ends,
    offsets,
    rows,
    indices,
    values,
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
    tl.store(indices + at, (first + tl.arange(0, TILE)).to(tl.int32), mask=reach)
    tl.store(values + at, value, mask=reach)


@triton.jit
def trim_kernel(indices, values, totals, ends, num_segments, out, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    found, kept = tl.load(totals + segment), tl.load(totals + num_segments + segment)
    before = tl.load(ends + segment) - found
    to = tl.load(ends + num_segments + segment) - kept
    least, room = 0, 0
    if found > kept:
        least, room = _kth_largest(values, before, 1, found, kept.to(tl.int32), BLOCK)
    ties = 0
    for at in range(0, found, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        there = lane < found
        bits = _magnitude(tl.load(values + before + lane, mask=there, other=0.0))
        tie = ((bits == least) & there).to(tl.int32)
        keep = (bits > least) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= room))
        place = tl.cumsum(keep.to(tl.int32), 0)
        index = tl.load(indices + before + lane, mask=there, other=0)
        tl.store(out + to + place - 1, index, mask=keep)
        to += tl.sum(keep.to(tl.int32), 0)
        ties += tl.sum(tie, 0)


def topk(x: Tensor, segments: Segments, plan: Sampling) -> Chosen:
    """Select the largest |x| of each segment, exactly."""
    return _sampled(x, segments, plan, table((0,) * len(segments), x.device), 0.8)


def sampled_topk(x: Tensor, segments: Segments, plan: Sampling, offsets: Tensor, lower: float) -> Chosen:
    """Select by a threshold from a sample of each segment, whose start `offsets` int64 (s,) moves."""
    return _sampled(x, segments, plan, uploaded(offsets, x.device), lower)


def _sampled(x: Tensor, segments: Segments, plan: Sampling, offsets: Tensor, lower: float) -> Chosen:
    device, num = x.device, plan.rounds + 2
    levels = torch.empty((len(segments), num), dtype=torch.int32, device=device)
    columns = (plan.strides, plan.samples, plan.ranks)
    if len(segments):
        with dispatch.device_of(x):
            levels_kernel[(len(segments),)](
                x,
                levels,
                table(segments.starts, device),
                offsets,
                *(table(column, device) for column in columns),
                float(lower),
                LEVELS=num,
                BLOCK=STEP,
                **WIDE,
            )
    return _reaching(x, segments, levels, plan.needs, plan.ks)


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    """Select |x| >= threshold, and not zero."""
    levels = levels_of(threshold).view(-1, 1)
    return _reaching(x, segments, uploaded(levels, x.device), (0,) * len(segments), segments.sizes)


def _reaching(
    x: Tensor, segments: Segments, levels: Tensor, needs: tuple[int, ...], ks: tuple[int, ...]
) -> Chosen:
    """Select the ks largest of what reaches the first of the levels int32 (s, l) that `needs` reach."""
    device, s, num = x.device, len(segments), levels.shape[1]
    if segments.numel == 0:
        return torch.empty(0, dtype=torch.int32, device=device), torch.zeros(s, dtype=torch.int64)
    rows = _rows(segments.sizes, device)
    num_tiles = sum(-(-size // TILE) for size in segments.sizes)
    counts = torch.empty((num, num_tiles), dtype=torch.int32, device=device)
    floors = torch.empty(s, dtype=torch.int32, device=device)
    offsets = torch.empty(num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty((2, s), dtype=torch.int64, device=device)
    with dispatch.device_of(x):
        _launch(count_kernel, segments, x, levels, counts, rows, num_tiles, LEVELS=num)
        pick_kernel[(s,)](
            levels,
            counts,
            num_tiles,
            rows,
            table(needs, device),
            table(ks, device),
            floors,
            totals,
            offsets,
            s,
            LEVELS=num,
            BLOCK=BLOCK,
            **OPTIONS,
        )
        ends = totals.cumsum(1)
        found, kept = totals.cpu()  # the only wait
        candidates, total = sum(found.tolist()), sum(kept.tolist())
        indices = torch.empty(candidates, dtype=torch.int32, device=device)
        values = torch.empty(candidates, dtype=torch.float32, device=device)
        _launch(compact_kernel, segments, x, floors, totals, ends, offsets, rows, indices, values)
        if total < candidates:
            out = torch.empty(total, dtype=torch.int32, device=device)
            trim_kernel[(s,)](indices, values, totals, ends, s, out, BLOCK=STEP // 2, **WIDE)
            indices = out
    return indices, kept.clone()


def _launch(kernel: Any, segments: Segments, x: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch once for all whole tiles of the segments, and once for the shorter last tiles."""
    starts, sizes = table(segments.starts, x.device), table(segments.sizes, x.device)
    aligned = all(start % 4 == 0 for start in segments.starts)
    for whole, part in zip((True, False), tiles(segments.sizes, TILE, x.device), strict=True):
        if len(part):
            kernel[(len(part),)](
                x,
                *arguments,
                starts,
                sizes,
                part.segment,
                part.first,
                **constants,
                TILE=TILE,
                ALIGNED=aligned,
                WHOLE=whole,
                **OPTIONS,
            )


@lru_cache(maxsize=256)
def _rows(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first tile of each segment, and the number of all, int64 (s + 1,)."""
    rows = [0]
    for size in sizes:
        rows.append(rows[-1] + -(-size // TILE))
    return torch.tensor(rows, dtype=torch.int64, device=device)
