# mypy: disable-error-code="no-untyped-def, untyped-decorator, unused-ignore"
"""Kernels that encode a sparse message, one program per tensor."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]

from laconic.kernels.entropy.triton_rice import rice_parameter


@triton.jit
def set_bits(words, bit, value, mask):
    """Or values of up to 32 bits into words."""
    shifted = value << (bit & 31)
    upper = (shifted >> 32).to(tl.int32)
    at = words + (bit >> 5)
    tl.atomic_or(at, shifted.to(tl.int32), mask=mask, sem="relaxed")
    tl.atomic_or(at + 1, upper, mask=mask & (upper != 0), sem="relaxed")


@triton.jit
def gaps(indices, first, lane, k):
    """Return indices and gaps; 0 for lanes from k on."""
    there = lane < k
    index = tl.load(indices + first + lane, mask=there, other=0).to(tl.int64)
    before = tl.load(indices + first + lane - 1, mask=there & (lane > 0), other=-1).to(tl.int64)
    return index, tl.where(there, index - before - 1, 0)


@triton.jit(do_not_specialize=["num"])
def measure_kernel(indices, counts, sizes, highs, num, SEGMENTS: tl.constexpr, ENTRIES: tl.constexpr):
    """Write the sum of a segment's high parts, or -1 if its indices do not ascend."""
    segment = tl.program_id(0)
    k, n = tl.load(counts + segment), tl.load(sizes + segment)
    r = rice_parameter(k, n)
    first = tl.zeros([1], tl.int64)
    for at in range(0, num, SEGMENTS):
        lane = at + tl.arange(0, SEGMENTS)
        first += tl.sum(tl.load(counts + lane, mask=lane < segment, other=0), 0)
    total = tl.zeros([1], tl.int64)
    wrong = tl.zeros([1], tl.int32)
    for at in range(0, k, ENTRIES):
        lane = at + tl.arange(0, ENTRIES)
        index, gap = gaps(indices, first, lane, k)
        total += tl.sum(gap >> r, 0)
        wrong |= tl.max(((gap < 0) | (index >= n)).to(tl.int32), 0)
    tl.store(highs + segment + tl.arange(0, 1), tl.where(wrong > 0, -1, total))


@triton.jit(do_not_specialize=["num"])
def write_kernel(
    x,
    indices,
    counts,
    sizes,
    starts,
    highs,
    num,
    words,
    facts,
    chosen,
    places,
    SEGMENTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    segment = tl.program_id(0)
    k, n = tl.load(counts + segment), tl.load(sizes + segment)
    r = rice_parameter(k, n)
    first, entries = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    low, all_low = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    high, all_high = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    wrong = tl.zeros([1], tl.int32)
    for at in range(0, num, SEGMENTS):
        lane = at + tl.arange(0, SEGMENTS)
        each = tl.load(counts + lane, mask=lane < num, other=0)
        size = tl.load(sizes + lane, mask=lane < num, other=0)
        lows = (each * rice_parameter(each, size) + 7) >> 3
        sums = tl.load(highs + lane, mask=lane < num, other=0)
        before = lane < segment
        first += tl.sum(tl.where(before, each, 0), 0)
        low += tl.sum(tl.where(before, lows, 0), 0)
        high += tl.sum(tl.where(before, sums, 0), 0)
        entries += tl.sum(each, 0)
        all_low += tl.sum(lows, 0)
        all_high += tl.sum(sums, 0)
        wrong |= tl.max((sums < 0).to(tl.int32), 0)
    nbytes = all_low + ((entries + all_high + 7) >> 3)
    head = 32 * (num + 1).to(tl.int64)
    one = tl.arange(0, 1)
    tl.store(words + segment, k.to(tl.int32))
    tl.store(words + num + one, nbytes.to(tl.int32), mask=segment == 0)
    tl.store(facts + one, nbytes, mask=segment == 0)
    tl.store(facts + 1 + one, wrong.to(tl.int64), mask=segment == 0)
    start = tl.load(starts + segment)
    low_bit = head + 8 * low
    unary_bit = head + 8 * all_low + first + high
    value_bit = head + 8 * nbytes
    for at in range(0, tl.where(tl.sum(wrong, 0) == 0, k, 0), ENTRIES):
        lane = at + tl.arange(0, ENTRIES)
        there = lane < k
        index, gap = gaps(indices, first, lane, k)
        q = gap >> r
        ends = tl.cumsum(q, 0)
        set_bits(words, low_bit + lane * r, gap & ((1 << r) - 1), there & (r > 0))
        set_bits(words, unary_bit + lane + ends, tl.full([ENTRIES], 1, tl.int64), there)
        unary_bit += tl.sum(q, 0)
        value = tl.load(x + start + index, mask=there, other=0.0)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        set_bits(words, value_bit + 32 * (first + lane), bits, there)
        tl.store(chosen + first + lane, value, mask=there)
        tl.store(places + first + lane, start + index, mask=there)
