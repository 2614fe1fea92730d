"""Triton kernels of the encoder."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.philox.reference import LOWER_KEY
from laconic.kernels.quantise.tile import ROWS, element, load_tile, remaining, store_codes

LOWER = tl.constexpr(LOWER_KEY - (1 << 64))
INFINITE = tl.constexpr(0x7F800000)
# values of SCALES
ONE_A_TENSOR, MEASURED, ONE_A_ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def factors(scale, most):
    enlarge = tl.where((scale > 0) & (scale < 8.673617379884035e-19), 1.2676506002282294e30, 1.0)
    z = scale * enlarge
    inv = tl.div_rn(most + tl.zeros_like(z), tl.where(scale == 0, 1.0, z))
    up = (inv.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    inv = tl.where(inv * z < most, up, inv)
    return tl.where(scale == 0, 0.0, inv), enlarge


@triton.jit
def chosen(index, w0, w1, w2, w3):
    return tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))


@triton.jit
def row_words(key, counter):
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(key, low, high, zero, zero)
    return w0[:, None], w1[:, None], w2[:, None], w3[:, None]


@triton.jit
def rounded_up(threshold, key, first, rows: tl.constexpr):
    row, col = tl.arange(0, rows), tl.arange(0, 8)[None, :]
    w0, w1, w2, w3 = row_words(key, (first >> 3) + row)
    upper = (chosen(col >> 1, w0, w1, w2, w3) >> ((col & 1) * 16).to(tl.uint32)).to(tl.int32) & 0xFFFF
    up = upper < (threshold >> 8)
    tie = (upper == (threshold >> 8)) & ((threshold & 255) > 0)
    if tl.max(tl.max(tie.to(tl.int32), axis=1), axis=0) > 0:
        w0, w1, w2, w3 = row_words(key ^ LOWER, (first >> 4) + (row >> 1))
        word = chosen((row[:, None] & 1) * 2 + (col >> 2), w0, w1, w2, w3)
        lower = (word >> ((col & 3) * 8).to(tl.uint32)).to(tl.int32) & 255
        up = up | (tie & (lower < (threshold & 255)))
    return up


@triton.jit
def level_of(
    size, factor, enlarge, key, first, LEVELS: tl.constexpr, POWERS: tl.constexpr, rows: tl.constexpr
):
    """Return `reference.level_and_threshold` of |x|, rounded: int32 (rows, 8)."""
    if POWERS:
        y = tl.minimum(size * enlarge * factor, 65536.0)
        bits = y.to(tl.int32, bitcast=True)
        above = bits >= ((127 + 16 + 1 - LEVELS) << 23)
        level = tl.where(above, (bits >> 23) - (127 + 16 - LEVELS), 0)
        scale: tl.constexpr = 2.0 ** (LEVELS - 1)
        low = (tl.minimum(y * scale, 65536.0) * 256.0).to(tl.int32)
        threshold = tl.where(above, (bits & 0x7FFFFF) << 1, low)
    else:
        y = tl.minimum(size * enlarge * factor, 65536.0 * LEVELS)
        level = y.to(tl.int32) >> 16
        threshold = ((y - (level << 16).to(tl.float32)) * 256.0).to(tl.int32)
    return level + rounded_up(threshold, key, first, rows).to(tl.int32)


@triton.jit
def quantise_kernel(
    x_ptr, wire_ptr, levels_ptr, scales_ptr, flags_ptr, keys_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, head_ptr, body_ptr, end_ptr, first_block_ptr, first_element_ptr, block,
    LEVELS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, POWERS: tl.constexpr,
    BLOCK: tl.constexpr, SCALES: tl.constexpr, UNPACKED: tl.constexpr,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a tile's codes or signed levels, and its scales if SCALES is MEASURED."""
    tile = tl.program_id(0)
    segment, first = tl.load(segment_ptr + tile), tl.load(first_ptr + tile)
    left = remaining(tl.load(sizes_ptr + segment), first)
    at = element(ROWS)
    x = load_tile(x_ptr, tl.load(starts_ptr + segment) + first, at, left, MASKED, ALIGNED)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    most: tl.constexpr = 65536.0 if POWERS else 65536.0 * LEVELS
    if SCALES == MEASURED:
        PER: tl.constexpr = BLOCK // 8
        COUNT: tl.constexpr = ROWS // PER
        largest = tl.max(tl.reshape(tl.max(magnitude, axis=1), [COUNT, PER]), axis=1)
        if tl.max(largest, axis=0) >= INFINITE:
            tl.store(flags_ptr + segment, 1)
        number = tl.arange(0, COUNT)
        inside = number * BLOCK < left
        whose = first // BLOCK + number
        if UNPACKED:
            to = scales_ptr + tl.load(first_block_ptr + segment) + whose
            tl.store(to, largest.to(tl.float32, bitcast=True), mask=inside)
        else:
            byte = tl.arange(0, 4)[None, :]
            to = wire_ptr + tl.load(head_ptr + segment) + whose[:, None] * 4 + byte
            part = (largest[:, None] >> (byte * 8)) & 255
            tl.store(to, part.to(tl.uint8), mask=inside[:, None] & (byte < 4))
        by_block, larger = factors(largest.to(tl.float32, bitcast=True), most)
        factor = tl.reshape(tl.broadcast_to(by_block[:, None], [COUNT, PER]), [ROWS])[:, None]
        enlarge = tl.reshape(tl.broadcast_to(larger[:, None], [COUNT, PER]), [ROWS])[:, None]
    else:
        from_block = scales_ptr + tl.load(first_block_ptr + segment)
        if SCALES == ONE_A_ROW:
            row = tl.arange(0, ROWS)
            scale = tl.load(from_block + (first + row * 8) // block, mask=row * 8 < left, other=0.0)[:, None]
        else:
            scale = tl.load(from_block + tl.zeros([1, 1], tl.int32))
        worst = tl.maximum(
            tl.max(tl.max(magnitude, axis=1), axis=0),
            tl.max(tl.max(scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0),
        )
        if worst >= INFINITE:
            tl.store(flags_ptr + segment, 1)
        factor, enlarge = factors(scale, most)
    size = magnitude.to(tl.float32, bitcast=True)
    level = level_of(size, factor, enlarge, tl.load(keys_ptr + segment), first, LEVELS, POWERS, ROWS)
    if UNPACKED:
        to = levels_ptr + tl.load(first_element_ptr + segment) + first + at
        signed = tl.where(bits < 0, -level, level)
        if MASKED:
            tl.store(to, signed, mask=at < left)
        else:
            tl.store(to, signed)
    else:
        code = level | tl.where(bits < 0, 1 << (BITS - 1), 0)
        body = tl.load(body_ptr + segment) + (first >> 3) * BITS
        store_codes(wire_ptr, body, tl.load(end_ptr + segment), code, BITS, COLUMNS, MASKED, ROWS)


@triton.jit
def put_scales_kernel(wire_ptr, scales_ptr, heads_ptr, count, SIZE: tl.constexpr):
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = number < count
    bits = tl.load(scales_ptr + number, mask=inside, other=0.0).to(tl.int32, bitcast=True)[:, None]
    byte = tl.arange(0, 4)[None, :]
    to = wire_ptr + tl.load(heads_ptr + number, mask=inside, other=0)[:, None] + byte
    tl.store(to, ((bits >> (byte * 8)) & 255).to(tl.uint8), mask=inside[:, None] & (byte < 4))
