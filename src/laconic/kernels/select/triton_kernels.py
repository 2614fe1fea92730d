# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Triton kernels of selection; each program writes a separate range.

levels    per segment    threshold, and lower ones to try
count     per tile       entries that reach each level
pick      per segment    first level that enough entries reach; where tiles write
compact   per tile       positions and values that reach it
trim      per segment    the k largest
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.philox.gpu import block

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude(x):
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(bits > INFINITY, 0, bits)


@triton.jit
def kth_largest(x, first, stride, n, k, BLOCK: tl.constexpr):
    """Return the k-th largest of x[first + i * stride], i < n, and its rank among its equals."""
    digits = tl.arange(0, 256)
    found = 0
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for at in range(0, n, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            there = lane < n
            bits = magnitude(tl.load(x + first + lane * stride, mask=there, other=0.0))
            if shift < 24:
                there = there & (((bits ^ found) >> (shift + 8)) == 0)
            counts += tl.histogram((bits >> shift) & 255, 256, mask=there)
        reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
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
        level, _ = kth_largest(x, first, stride, count, rank.to(tl.int32), BLOCK)
    value = level.to(tl.float32, bitcast=True)
    for j in tl.static_range(LEVELS - 1):
        bits = tl.where(rank > 0, value.to(tl.int32, bitcast=True), level)
        tl.store(levels + segment * LEVELS + j, tl.maximum(bits, 1))
        value = value * lower
    tl.store(levels + segment * LEVELS + LEVELS - 1, tl.where(rank < 0, MAGNITUDE, 1))


@triton.jit
def load_tile(
    x, starts, sizes, segments, firsts, TILE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr
):
    """Return a tile's segment, first element and values."""
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
    segment, first, value = load_tile(x, starts, sizes, segments, firsts, TILE, ALIGNED, WHOLE)
    bits = magnitude(value)
    out = counts + tl.load(rows + segment) + first // TILE
    for j in tl.static_range(0, LEVELS, 2):  # two counts, at most 4,096, in one sum
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
    for j in tl.static_range(LEVELS - 2, -1, -1):  # ends at the first level that enough reach
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
    segment, first, value = load_tile(x, starts, sizes, segments, firsts, TILE, ALIGNED, WHOLE)
    reach = magnitude(value) >= tl.load(floors + segment)
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
        least, left = kth_largest(values, before, 1, found, kept.to(tl.int32), BLOCK)
    ties = 0
    for at in range(0, found, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        there = lane < found
        bits = magnitude(tl.load(values + before + lane, mask=there, other=0.0))
        tie = ((bits == least) & there).to(tl.int32)
        keep = (bits > least) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= left))
        place = tl.cumsum(keep.to(tl.int32), 0)
        index = tl.load(indices + before + lane, mask=there, other=0)
        tl.store(out + to + place - 1, index, mask=keep)
        to += tl.sum(keep.to(tl.int32), 0)
        ties += tl.sum(tie, 0)
