# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Triton kernels of low-rank products and Gram-Schmidt, for factors of up to 4 columns.

Sums have a fixed order: GPUs of one kind give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def times_kernel(
    x,
    right,
    left,
    starts,
    rows,
    cols,
    lefts,
    rights,
    matrices,
    firsts,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    matrix = tl.load(matrices + tl.program_id(0))
    m = tl.load(rows + matrix)
    n = tl.load(cols + matrix)
    row = tl.load(firsts + tl.program_id(0)) + tl.arange(0, ROWS)
    at = x + tl.load(starts + matrix) + row[:, None] * n
    q = right + tl.load(rights + matrix)
    p = left + tl.load(lefts + matrix)
    there = row < m
    sum0 = tl.zeros((ROWS, COLS), tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    for first in range(0, n, COLS):
        col = first + tl.arange(0, COLS)
        inside = col < n
        tile = tl.load(at + col[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        sum0 += tile * tl.load(q + col, mask=inside, other=0.0)[None, :]
        if RANK > 1:
            sum1 += tile * tl.load(q + n + col, mask=inside, other=0.0)[None, :]
        if RANK > 2:
            sum2 += tile * tl.load(q + 2 * n + col, mask=inside, other=0.0)[None, :]
        if RANK > 3:
            sum3 += tile * tl.load(q + 3 * n + col, mask=inside, other=0.0)[None, :]
    tl.store(p + row, tl.sum(sum0, 1), mask=there)
    if RANK > 1:
        tl.store(p + m + row, tl.sum(sum1, 1), mask=there)
    if RANK > 2:
        tl.store(p + 2 * m + row, tl.sum(sum2, 1), mask=there)
    if RANK > 3:
        tl.store(p + 3 * m + row, tl.sum(sum3, 1), mask=there)


@triton.jit
def transposed_times_kernel(
    x,
    left,
    sums,
    starts,
    rows,
    cols,
    lefts,
    matrices,
    firsts,
    tops,
    places,
    RANK: tl.constexpr,
    HEIGHT: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store sums over HEIGHT rows from `tops`, for WIDE columns from `firsts`, at `places`."""
    matrix = tl.load(matrices + tl.program_id(0))
    m = tl.load(rows + matrix)
    n = tl.load(cols + matrix)
    top = tl.load(tops + tl.program_id(0))
    col = tl.load(firsts + tl.program_id(0)) + tl.arange(0, WIDE)
    at = x + tl.load(starts + matrix) + col[None, :]
    p = left + tl.load(lefts + matrix)
    to = sums + tl.load(places + tl.program_id(0)) + col
    there = col < n
    sum0 = tl.zeros((TALL, WIDE), tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    for first in range(top, tl.minimum(m, top + HEIGHT), TALL):
        row = first + tl.arange(0, TALL)
        inside = row < m
        tile = tl.load(at + row[:, None] * n, mask=inside[:, None] & there[None, :], other=0.0)
        sum0 += tile * tl.load(p + row, mask=inside, other=0.0)[:, None]
        if RANK > 1:
            sum1 += tile * tl.load(p + m + row, mask=inside, other=0.0)[:, None]
        if RANK > 2:
            sum2 += tile * tl.load(p + 2 * m + row, mask=inside, other=0.0)[:, None]
        if RANK > 3:
            sum3 += tile * tl.load(p + 3 * m + row, mask=inside, other=0.0)[:, None]
    tl.store(to, tl.sum(sum0, 0), mask=there)
    if RANK > 1:
        tl.store(to + n, tl.sum(sum1, 0), mask=there)
    if RANK > 2:
        tl.store(to + 2 * n, tl.sum(sum2, 0), mask=there)
    if RANK > 3:
        tl.store(to + 3 * n, tl.sum(sum3, 0), mask=there)


@triton.jit
def total_kernel(sums, right, places, counts, sizes, rights, matrices, firsts, PART: tl.constexpr):
    """Add each matrix's `counts` x `sizes` sums."""
    matrix = tl.load(matrices + tl.program_id(0))
    size = tl.load(sizes + matrix)
    lane = tl.load(firsts + tl.program_id(0)) + tl.arange(0, PART)
    there = lane < size
    at = sums + tl.load(places + matrix) + lane
    total = tl.zeros((PART,), tl.float32)
    for part in range(0, tl.load(counts + matrix)):
        total += tl.load(at + part * size, mask=there, other=0.0)
    tl.store(right + tl.load(rights + matrix) + lane, total, mask=there)


@triton.jit
def product_add_kernel(
    x,
    left,
    right,
    alpha,
    starts,
    rows,
    cols,
    lefts,
    rights,
    matrices,
    firsts,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    matrix = tl.load(matrices + tl.program_id(0))
    m = tl.load(rows + matrix)
    n = tl.load(cols + matrix)
    row = tl.load(firsts + tl.program_id(0)) + tl.arange(0, ROWS)
    at = x + tl.load(starts + matrix) + row[:, None] * n
    p = left + tl.load(lefts + matrix) + row
    q = right + tl.load(rights + matrix)
    there = row < m
    p0 = tl.load(p, mask=there, other=0.0)
    p1 = p0
    p2 = p0
    p3 = p0
    if RANK > 1:
        p1 = tl.load(p + m, mask=there, other=0.0)
    if RANK > 2:
        p2 = tl.load(p + 2 * m, mask=there, other=0.0)
    if RANK > 3:
        p3 = tl.load(p + 3 * m, mask=there, other=0.0)
    for first in range(0, n, COLS):
        col = first + tl.arange(0, COLS)
        inside = col < n
        product = p0[:, None] * tl.load(q + col, mask=inside, other=0.0)[None, :]
        if RANK > 1:
            product += p1[:, None] * tl.load(q + n + col, mask=inside, other=0.0)[None, :]
        if RANK > 2:
            product += p2[:, None] * tl.load(q + 2 * n + col, mask=inside, other=0.0)[None, :]
        if RANK > 3:
            product += p3[:, None] * tl.load(q + 3 * n + col, mask=inside, other=0.0)[None, :]
        both = there[:, None] & inside[None, :]
        old = tl.load(at + col[None, :], mask=both, other=0.0)
        tl.store(at + col[None, :], old + product * alpha, mask=both)


@triton.jit
def orthonormal_kernel(
    packed,
    work,
    places,
    lengths,
    SPENT: tl.constexpr,
    RANK: tl.constexpr,
    FULL: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Orthonormalise a factor in float64, in `work`. FULL: least power of two >= RANK."""
    place = tl.load(places + tl.program_id(0))
    length = tl.load(lengths + tl.program_id(0))
    column = tl.arange(0, FULL)
    given = packed + place + column[:, None] * length
    kept = work + place + column[:, None] * length
    before = tl.zeros((FULL,), tl.float64)
    for first in range(0, length, LENGTH):
        lane = first + tl.arange(0, LENGTH)
        there = (column < RANK)[:, None] & (lane < length)[None, :]
        value = tl.load(given + lane[None, :], mask=there, other=0.0).to(tl.float64)
        tl.store(kept + lane[None, :], value, mask=there)
        before += tl.sum(value * value, 1)
    tl.debug_barrier()
    for k in range(RANK):
        mine = column == k
        dots = tl.zeros((FULL,), tl.float64)
        for first in range(0, length, LENGTH):
            lane = first + tl.arange(0, LENGTH)
            there = (column < RANK)[:, None] & (lane < length)[None, :]
            value = tl.load(kept + lane[None, :], mask=there, other=0.0)
            one = tl.sum(tl.where(mine[:, None], value, 0.0), 0)
            dots += tl.sum(value * one[None, :], 1)
        squared = tl.sum(tl.where(mine, dots, 0.0), 0)
        least = tl.sum(tl.where(mine, before, 0.0), 0) * SPENT
        spent = squared <= least  # false for NaN, which must remain
        inverse = tl.where(spent, 0.0, 1.0 / tl.sqrt(tl.where(spent, 1.0, squared)))
        factor = tl.where(column > k, dots * inverse, 0.0)
        tl.debug_barrier()
        for first in range(0, length, LENGTH):
            lane = first + tl.arange(0, LENGTH)
            there = (column < RANK)[:, None] & (lane < length)[None, :]
            value = tl.load(kept + lane[None, :], mask=there, other=0.0)
            one = tl.sum(tl.where(mine[:, None], value, 0.0), 0) * inverse
            value = tl.where(mine[:, None], one[None, :], value - factor[:, None] * one[None, :])
            tl.store(kept + lane[None, :], value, mask=there)
            tl.store(given + lane[None, :], value.to(tl.float32), mask=there & mine[:, None])
        tl.debug_barrier()
