"""Triton kernel that encodes tiles."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from laconic.kernels.minmax.gpu_tile import (
    INFINITE,
    MAGNITUDE,
    block_numbers,
    by_block,
    by_row,
    row_numbers,
    store32,
)

FARTHEST = tl.constexpr(2.0**126)
LOWER_KEY = tl.constexpr(0xD1B54A32D192ED03 - (1 << 64))


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    wire_ptr,
    keys_ptr,
    flags_ptr,
    table_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Store a tile's heads and levels, and a flag if a value is not finite."""
    tile = table_ptr + tl.program_id(0) * 6  # columns: `gpu_tables._tiles`
    start, head, body = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    first, count, number = tl.load(tile + 3), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5)
    if ALIGNED:
        start = (start >> 2) * 4  # a multiple of 4, for the compiler
    most: tl.constexpr = (1 << WIDTH) - 1.0
    row, column = row_numbers(), tl.arange(0, 4)[None, :]
    place = row[:, None] * 4 + column
    if MASKED:
        inside = place < count
        x = tl.load(x_ptr + start + place, mask=inside, other=0.0)
        least = tl.min(tl.where(inside, x, float("inf")), axis=1)
        greatest = tl.max(tl.where(inside, x, float("-inf")), axis=1)
    else:
        x = tl.load(x_ptr + start + place)
        least = tl.min(x, axis=1)
        greatest = tl.max(x, axis=1)
    worst = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    tl.store(flags_ptr + number + row * 0, row * 0 + 1, mask=worst >= INFINITE)  # row * 0 broadcasts
    low = tl.min(tl.min(tl.min(by_block(least, BLOCK), axis=1), axis=4), axis=2)
    high = tl.max(tl.max(tl.max(by_block(greatest, BLOCK), axis=1), axis=4), axis=2)
    low = tl.minimum(tl.maximum(low, -FARTHEST), FARTHEST) + 0.0  # -0.0 becomes 0.0
    high = tl.minimum(tl.maximum(high, -FARTHEST), FARTHEST) + 0.0
    unit = tl.div_rn(high - low, low * 0.0 + most)
    block = block_numbers(BLOCK)
    here = block * BLOCK < count
    at = wire_ptr + head + block * 8
    store32(at, unit.to(tl.int32, bitcast=True), here, WORDS)
    store32(at + 4, low.to(tl.int32, bitcast=True), here, WORDS)
    divisor = tl.where(unit == 0.0, float("inf"), unit)  # quotient 0
    y = tl.div_rn(x - by_row(low, BLOCK)[:, None], by_row(divisor, BLOCK)[:, None])
    if STOCHASTIC:
        y = tl.minimum(tl.maximum(y, 0.0), most)
        code = _at_random(y, tl.load(keys_ptr + number), first, row, column, count, MASKED)
    else:
        code = tl.minimum(tl.maximum(y + 0.5, 0.0), most).to(tl.int32)
    if MASKED:
        code = tl.where(inside, code, 0)
    packed = tl.sum(code << (column * WIDTH), axis=1)
    each: tl.constexpr = WIDTH // 2
    into = wire_ptr + body + row * each
    if WORDS and WIDTH == 4:
        tl.store(into.to(tl.pointer_type(tl.int16)), packed.to(tl.int16))
    elif WORDS and WIDTH == 8:
        tl.store(into.to(tl.pointer_type(tl.int32)), packed)
    else:
        for i in tl.static_range(each):
            byte = ((packed >> (8 * i)) & 255).to(tl.uint8)
            if MASKED:
                tl.store(into + i, byte, mask=row * each + i < (count * WIDTH + 7) // 8)
            else:
                tl.store(into + i, byte)


@triton.jit  # type: ignore[untyped-decorator]
def _at_random(y, key, first, row, column, count, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round by `dither24`: 16 bits decide; at a tie, once in 65,536, 8 more do."""
    zero = (row * 0).to(tl.uint32)
    base = first >> 3
    counter = (base & 0xFFFFFFFF).to(tl.uint32) + (row >> 1).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, counter, zero + (base >> 32).to(tl.uint32), zero, zero)
    odd = (row & 1) == 1
    word = tl.where(column < 2, tl.where(odd, w2, w0)[:, None], tl.where(odd, w3, w1)[:, None])
    carry = ((word >> ((column & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32) ^ 0xFFFF
    y = y * 65536.0
    fixed = y.to(tl.int32)
    dithered = fixed + carry
    code = dithered >> 16
    tie = (dithered & 0xFFFF) == 0xFFFF
    if MASKED:
        tie = tie & (row[:, None] * 4 + column < count)
    if tl.max(tl.max(tie.to(tl.int32), axis=1), axis=0) > 0:
        half = first >> 4
        place = (half & 0xFFFFFFFF).to(tl.uint32) + (row >> 2).to(tl.uint32)
        v0, v1, v2, v3 = tl.philox(key ^ LOWER_KEY, place, zero + (half >> 32).to(tl.uint32), zero, zero)
        bytes4 = tl.where((row & 2) == 0, tl.where(odd, v1, v0), tl.where(odd, v3, v2))
        lower = ((bytes4[:, None] >> (column * 8).to(tl.uint32)) & 255).to(tl.int32)
        below = ((y - fixed.to(tl.float32)) * 256.0).to(tl.int32)
        code += (tie & (lower < below)).to(tl.int32)
    return code
