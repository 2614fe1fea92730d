"""Quantisers in Triton: one launch a message for whole tiles, and one for what is left of each tensor.

A tile is 512 rows of 8 elements: eight codes fill whole bytes, and share the counter of their dither.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.philox.reference import LOWER_KEY
from laconic.kernels.quantise import reference
from laconic.kernels.quantise.form import Form, Measure
from laconic.kernels.quantise.norms import blocks_of, finished
from laconic.kernels.quantise.places import Places, device_keys, owners, places
from laconic.kernels.tiles import tiles

TILE = 4096
ROWS = tl.constexpr(TILE // 8)
FOURS = tl.constexpr(TILE // 4)
FIVES = 1024  # bytes of a tile of digits
BLOCKS = tuple(1 << i for i in range(5, 13))  # blocks that a tile holds whole, measured as it is quantised
LOWER = tl.constexpr(LOWER_KEY - (1 << 64))
INFINITE = tl.constexpr(0x7F800000)
ONE_A_TENSOR, MEASURED, ONE_A_ROW = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
)  # where scales come from
LARGEST, SQUARES, SIZES, MOMENTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WHAT = {"max": (0, 0), "l2": (1, 1), "mean": (2, 1)}  # what is measured, and float64 numbers a part


@triton.jit
def element(rows: tl.constexpr):
    """Place of each element of a tile: int32 (rows, 8)."""
    return tl.arange(0, rows)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def factors(scale, most):
    """What |x| is multiplied by, in two steps, to become y: `reference.factors`."""
    enlarge = tl.where((scale > 0) & (scale < 8.673617379884035e-19), 1.2676506002282294e30, 1.0)
    z = scale * enlarge
    inv = tl.div_rn(most + tl.zeros_like(z), tl.where(scale == 0, 1.0, z))
    up = (inv.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    inv = tl.where(inv * z < most, up, inv)
    return tl.where(scale == 0, 0.0, inv), enlarge


@triton.jit
def chosen(index, w0, w1, w2, w3):
    """Word `index` of four."""
    return tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))


@triton.jit
def row_words(key, counter):
    """The four words of each row's counter int64 (rows,), as (rows, 1)."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(key, low, high, zero, zero)
    return w0[:, None], w1[:, None], w2[:, None], w3[:, None]


@triton.jit
def rounded_up(threshold, key, first, rows: tl.constexpr):
    """Whether the dither of each element is below its threshold of 24 bits."""
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
    """Levels int32 (rows, 8) of |x|: `reference.level_and_threshold`, rounded."""
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
def store_codes(
    wire_ptr, body, end, code,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Eight codes a row (rows, 8) as BITS bytes each, from byte `body` on, but none from `end` on."""
    shift = tl.arange(0, 8)[None, :] * BITS
    column = tl.arange(0, COLUMNS)[None, :]
    if BITS <= 4:
        low = tl.sum(code << shift, axis=1)[:, None]
        part = low >> (column * 8)
    elif BITS <= 8:
        low = tl.sum(code.to(tl.int64) << shift, axis=1)[:, None]
        part = (low >> (column * 8)).to(tl.int32)
    else:
        wide = code.to(tl.int64)
        low = tl.sum(tl.where(shift < 64, wide << (shift & 63), 0), axis=1)[:, None]
        above = tl.where(shift >= 64, wide << (shift & 63), wide >> tl.minimum(64 - shift, 63))
        high = tl.sum(tl.where(shift + BITS > 64, above, 0), axis=1)[:, None]
        part = (tl.where(column < 8, low, high) >> ((column & 7) * 8)).to(tl.int32)
    at = tl.arange(0, rows)[:, None] * BITS + column
    wire_ptr += body
    if MASKED:
        tl.store(wire_ptr + at, (part & 255).to(tl.uint8), mask=(column < BITS) & (at < remaining(end, body)))
    elif BITS == COLUMNS:
        tl.store(wire_ptr + at, (part & 255).to(tl.uint8))
    else:
        tl.store(wire_ptr + at, (part & 255).to(tl.uint8), mask=(column < BITS) & (at >= 0))


@triton.jit
def remaining(end, begin):
    """end - begin as int32, at most what a tile may need."""
    return tl.minimum(end - begin, 1 << 20).to(tl.int32)


@triton.jit
def load_codes(wire_ptr, bit, end, BITS: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr):
    """Codes int32 that begin at these bits int32, each in SPAN bytes; bytes from `end` on are zero."""
    byte, shift = bit >> 3, bit & 7
    if SPAN == 1 and not MASKED:
        return (tl.load(wire_ptr + byte).to(tl.int32) >> shift) & ((1 << BITS) - 1)
    if SPAN <= 3:
        whole = tl.load(wire_ptr + byte, mask=byte < end, other=0).to(tl.int32)
        for i in tl.static_range(1, SPAN):
            whole |= tl.load(wire_ptr + byte + i, mask=byte + i < end, other=0).to(tl.int32) << (8 * i)
        return (whole >> shift) & ((1 << BITS) - 1)
    wide = tl.load(wire_ptr + byte, mask=byte < end, other=0).to(tl.int64)
    for i in tl.static_range(1, SPAN):
        wide |= tl.load(wire_ptr + byte + i, mask=byte + i < end, other=0).to(tl.int64) << (8 * i)
    return ((wide >> shift) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def quotient(size, LEVELS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """size / LEVELS, by the factors of `inverse`."""
    if LEVELS == 1:
        return size
    if HIGH == 0:
        return tl.div_rn(size, tl.zeros_like(size) + LEVELS)
    if LOW == 0:
        return size * HIGH
    return size * HIGH + size * LOW


@triton.jit
def block_of(first, left, BLOCK: tl.constexpr):
    """Block of each four elements of the tile at `first`, `left` of them the tensor's: (FOURS or 1, 1)."""
    if BLOCK == 0:
        return tl.zeros([1, 1], tl.int64)
    else:  # noqa: RET505 - Triton wants one type
        inside = tl.minimum(tl.arange(0, FOURS) * 4, left - 1).to(tl.uint32)
        return (first // BLOCK + ((first % BLOCK).to(tl.uint32) + inside) // BLOCK)[:, None]


@triton.jit
def value_of(
    signed, scale, LEVELS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr
):
    """float32 values: `reference.values`."""
    if POWERS:
        size = ((127 + tl.abs(signed) - LEVELS) << 23).to(tl.float32, bitcast=True)
        size = tl.where(signed != 0, size, 0.0)
        return tl.where(signed < 0, -size, size) * scale
    return quotient(signed.to(tl.float32), LEVELS, HIGH, LOW) * scale


@triton.jit
def load_tile(x_ptr, base, at, left, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements base + at of x; zeros from `left` on."""
    if ALIGNED:
        base = (base >> 2) * 4
    if MASKED:
        return tl.load(x_ptr + base + at, mask=at < left, other=0.0)
    return tl.load(x_ptr + base + at)


@triton.jit
def quantise_kernel(
    x_ptr, wire_ptr, levels_ptr, scales_ptr, flags_ptr, keys_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, head_ptr, body_ptr, end_ptr, first_block_ptr, first_element_ptr, block,
    LEVELS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, POWERS: tl.constexpr,
    BLOCK: tl.constexpr, SCALES: tl.constexpr, UNPACKED: tl.constexpr,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
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
    """Write scales float32 (count,) to the wire, each at its place."""
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = number < count
    bits = tl.load(scales_ptr + number, mask=inside, other=0.0).to(tl.int32, bitcast=True)[:, None]
    byte = tl.arange(0, 4)[None, :]
    to = wire_ptr + tl.load(heads_ptr + number, mask=inside, other=0)[:, None] + byte
    tl.store(to, ((bits >> (byte * 8)) & 255).to(tl.uint8), mask=inside[:, None] & (byte < 4))


@triton.jit
def get_scales_kernel(
    wire_ptr,
    stride,
    scales_ptr,
    heads_ptr,
    count,
    tails_ptr,
    limits_ptr,
    tail_count,
    flags_ptr,
    SIZE: tl.constexpr,
):
    """Read the scales of message program_id(1) to float32 (count,); its flags 0 and 2 show damage.

    Three flags a message are followed by one that shows that any of them is set.
    """
    message = tl.program_id(1)
    wire_ptr += message * stride
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = number < count
    head = tl.load(heads_ptr + number, mask=inside, other=0)
    bits = tl.load(wire_ptr + head, mask=inside, other=0).to(tl.uint32)
    for i in tl.static_range(1, 4):
        bits |= tl.load(wire_ptr + head + i, mask=inside, other=0).to(tl.uint32) << (8 * i)
    tl.store(scales_ptr + message * count + number, bits.to(tl.float32, bitcast=True), mask=inside)
    if tl.max((bits >= 0x7F800000).to(tl.int32), axis=0) > 0:
        tl.store(flags_ptr + 3 * message, 1)
        tl.store(flags_ptr + 3 * tl.num_programs(1), 1)
    tail = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    used = tail < tail_count
    last = tl.load(wire_ptr + tl.load(tails_ptr + tail, mask=used, other=0), mask=used, other=0).to(tl.int64)
    limit = tl.load(limits_ptr + tail, mask=used, other=1 << 20)
    if tl.max((last >= limit).to(tl.int32), axis=0) > 0:
        tl.store(flags_ptr + 3 * message + 2, 1)
        tl.store(flags_ptr + 3 * tl.num_programs(1), 1)


@triton.jit
def check_levels_kernel(
    wire_ptr, stride, flags_ptr, segment_ptr, first_ptr, sizes_ptr, body_ptr, end_ptr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Flag 1 of message program_id(1) shows a level that there is not."""
    message = tl.program_id(1)
    segment, first = tl.load(segment_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0))
    at = element(ROWS)
    body = tl.load(body_ptr + segment) + (first >> 3) * BITS
    end = remaining(tl.load(end_ptr + segment), body)
    code = load_codes(wire_ptr + message * stride + body, at * BITS, end, BITS, SPAN, True)
    if tl.max(tl.max(code & ((1 << (BITS - 1)) - 1), axis=1), axis=0) > LEVELS:
        tl.store(flags_ptr + 3 * message + 1, 1)
        tl.store(flags_ptr + 3 * tl.num_programs(1), 1)


@triton.jit
def load_fours(wire_ptr, end, BITS: tl.constexpr, MASKED: tl.constexpr, fours: tl.constexpr):
    """Codes of four elements each, the first in the lowest bits: uint32 (fours,), or uint64 above 8 bits.

    Bytes from `end` on are zero.
    """
    SPAN: tl.constexpr = (BITS + 1) // 2
    bit = tl.arange(0, fours) * (4 * BITS)
    byte = bit >> 3
    if BITS <= 8:  # noqa: SIM108
        word = tl.zeros([fours], tl.uint32)
    else:
        word = tl.zeros([fours], tl.uint64)
    for i in tl.static_range(SPAN):
        if MASKED:
            part = tl.load(wire_ptr + byte + i, mask=byte + i < end, other=0)
        else:
            part = tl.load(wire_ptr + byte + i)
        word |= part.to(word.dtype) << (8 * i)
    if BITS % 2:
        word >>= (bit & 4).to(word.dtype)
    return word


@triton.jit
def unscaled(
    word,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    POWERS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
):
    """float32 (fours, 4) of words of codes [sign 1 | level]: values of a block whose scale is 1."""
    column = tl.arange(0, 4)[None, :]
    code = (word[:, None] >> (column * BITS).to(word.dtype)).to(tl.uint32)
    level = code & ((1 << (BITS - 1)) - 1)
    sign = (code << (32 - BITS)) & 0x80000000
    if POWERS:
        size = ((level + (127 - LEVELS)) << 23) | sign
        return tl.where(level != 0, size, 0).to(tl.float32, bitcast=True)
    # +-(2^23 + level) -+ 2^23: a conversion would take longer; 0 has no sign
    size = (level | sign | 0x4B000000).to(tl.float32, bitcast=True)
    size += (sign ^ 0xCB000000).to(tl.float32, bitcast=True)
    return quotient(size, LEVELS, HIGH, LOW)


@triton.jit
def pack_base3_kernel(
    levels_ptr, wire_ptr, segment_ptr, first_ptr, sizes_ptr, body_ptr, first_element_ptr, SIZE: tl.constexpr
):
    """Signed levels int32 of SIZE bytes, five to a byte in base 3: 0, 1, and 2 for -1."""
    segment, first = tl.load(segment_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0))
    left = remaining(tl.load(sizes_ptr + segment), first)
    levels_ptr += tl.load(first_element_ptr + segment) + first
    byte = tl.arange(0, SIZE)
    whole, power = tl.zeros([SIZE], tl.int32), 1
    for i in tl.static_range(5):
        at = byte * 5 + i
        level = tl.load(levels_ptr + at, mask=at < left, other=0)
        whole += tl.where(level < 0, 2, level) * power
        power *= 3
    to = wire_ptr + tl.load(body_ptr + segment) + first // 5 + byte
    tl.store(to, whole.to(tl.uint8), mask=byte * 5 < left)


@triton.jit
def check_base3_kernel(
    wire_ptr, stride, flags_ptr, segment_ptr, first_ptr, body_ptr, end_ptr, SIZE: tl.constexpr
):
    """Flag 1 of message program_id(1) shows a byte that five digits cannot be."""
    message = tl.program_id(1)
    segment, first = tl.load(segment_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0))
    body = tl.load(body_ptr + segment) + first // 5
    byte = tl.arange(0, SIZE)
    inside = byte < remaining(tl.load(end_ptr + segment), body)
    code = tl.load(wire_ptr + message * stride + body + byte, mask=inside, other=0).to(tl.int32)
    if tl.max(code, axis=0) > 242:
        tl.store(flags_ptr + 3 * message + 1, 1)
        tl.store(flags_ptr + 3 * tl.num_programs(1), 1)


@triton.jit
def ternary(wire_ptr, first, at, left, MASKED: tl.constexpr):
    """float32 -1, 0, 1 of elements first + at of a tensor whose bytes, five digits each, are at wire_ptr."""
    place = (first % 5).to(tl.int32) + at
    byte, digit = place // 5, place % 5
    wire_ptr += first // 5
    if MASKED:
        whole = tl.load(wire_ptr + byte, mask=at < left, other=0).to(tl.uint32)
    else:
        whole = tl.load(wire_ptr + byte).to(tl.uint32)
    # whole * 2^16 / 3^digit, rounded up: exact for a byte
    factor = tl.where(digit < 2, tl.where(digit == 0, 65536, 21846), tl.where(digit == 2, 7282, 2428))
    power = ((whole * tl.where(digit == 4, 810, factor).to(tl.uint32)) >> 16).to(tl.int32)
    code = power - power // 3 * 3
    return tl.where(code == 2, -1, code).to(tl.float32)


@triton.jit
def dequantise_kernel(
    wire_ptr, stride, messages, scales_ptr, count, flags_ptr, out_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, body_ptr, end_ptr, first_block_ptr, alpha,
    LEVELS: tl.constexpr, BITS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, BASE3: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out += alpha * values of each message whose three flags are 0, in their order."""
    tile = tl.program_id(0)
    segment, first = tl.load(segment_ptr + tile), tl.load(first_ptr + tile)
    left = remaining(tl.load(sizes_ptr + segment), first)
    four = tl.arange(0, FOURS)
    at = four[:, None] * 4 + tl.arange(0, 4)[None, :]
    base = tl.load(starts_ptr + segment) + first
    if ALIGNED:
        base = (base >> 2) * 4
    out = load_tile(out_ptr, base, at, left, MASKED, ALIGNED)
    body = tl.load(body_ptr + segment)
    if not BASE3:
        body += (first >> 3) * BITS
    end = remaining(tl.load(end_ptr + segment), body)
    wire_ptr += body
    scales_ptr += tl.load(first_block_ptr + segment)
    block = block_of(first, left, BLOCK)
    damaged = tl.load(flags_ptr + 3 * messages) != 0
    for message in range(messages):
        bad = False
        if damaged:
            flags = flags_ptr + 3 * message
            bad = (tl.load(flags) | tl.load(flags + 1) | tl.load(flags + 2)) != 0
        if not bad:
            scale = tl.load(scales_ptr + block)
            if BASE3:
                out += ternary(wire_ptr, first, at, left, MASKED) * scale * alpha
            else:
                word = load_fours(wire_ptr, end, BITS, MASKED, FOURS)
                out += unscaled(word, LEVELS, BITS, POWERS, HIGH, LOW) * scale * alpha
        wire_ptr += stride
        scales_ptr += count
    if MASKED:
        tl.store(out_ptr + base + at, out, mask=at < left)
    else:
        tl.store(out_ptr + base + at, out)


@triton.jit
def levels_kernel(
    signed_ptr, end, used, zero, scales_ptr, flags_ptr, out_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, first_element_ptr, first_block_ptr, alpha,
    LEVELS: tl.constexpr, BITS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, FRESH: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out += alpha * values of levels: int32 if BITS is 0, else packed codes level + zero in 0..2 zero.

    FRESH: out is 0 before. Of the last byte of codes, only the lowest `used` bits may be set.
    """
    tile = tl.program_id(0)
    segment, first = tl.load(segment_ptr + tile), tl.load(first_ptr + tile)
    left = remaining(tl.load(sizes_ptr + segment), first)
    four, column = tl.arange(0, FOURS)[:, None], tl.arange(0, 4)[None, :]
    at = four * 4 + column
    base = tl.load(starts_ptr + segment) + first
    if ALIGNED:
        base = (base >> 2) * 4
    if FRESH:  # noqa: SIM108
        out = tl.zeros([FOURS, 4], tl.float32)
    else:
        out = load_tile(out_ptr, base, at, left, MASKED, ALIGNED)
    number = tl.load(first_element_ptr + segment) + first
    if BITS == 0:
        if MASKED:
            signed = tl.load(signed_ptr + number + at, mask=at < left, other=0)
        else:
            signed = tl.load(signed_ptr + number + at)
    else:
        byte, bit = (number * BITS) >> 3, ((number * BITS) & 7).to(tl.int32)
        stop = remaining(end, byte)
        if BITS <= 14:  # four codes, from any bit on, lie in one word
            SPAN: tl.constexpr = (4 * BITS + 14) // 8
            if BITS <= 6:  # noqa: SIM108
                word = tl.zeros([FOURS, 1], tl.uint32)
            else:
                word = tl.zeros([FOURS, 1], tl.uint64)
            bits = bit + four * (4 * BITS)
            for i in tl.static_range(SPAN):
                place = (bits >> 3) + i
                part = tl.load(signed_ptr + byte + place, mask=place < stop, other=0)
                word |= part.to(word.dtype) << (8 * i)
            word >>= (bits & 7).to(word.dtype)
            code = (word >> (column * BITS).to(word.dtype)).to(tl.int32) & ((1 << BITS) - 1)
        else:
            code = load_codes(signed_ptr + byte, bit + at * BITS, stop, BITS, (BITS + 14) // 8, True)
        if MASKED:
            code = tl.where(at < left, code, 0)
        beyond = tl.load(signed_ptr + end - 1).to(tl.int32) >> used
        if (tl.max(tl.max(code, axis=1), axis=0) > 2 * zero) | (beyond != 0):
            tl.store(flags_ptr, 1)
        signed = code - zero
    scale = tl.load(scales_ptr + tl.load(first_block_ptr + segment) + block_of(first, left, BLOCK))
    out += value_of(signed, scale, LEVELS, POWERS, HIGH, LOW) * alpha
    if MASKED:
        tl.store(out_ptr + base + at, out, mask=at < left)
    else:
        tl.store(out_ptr + base + at, out)


@triton.jit
def packed_sum_kernel(
    wires_ptr, nbytes, ranks, sums_ptr, sums_nbytes, flags_ptr, n, most,
    BITS: tl.constexpr, SPAN: tl.constexpr, SUM_BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over ranks of packed integers in 0..most, packed again. Flag r: rank r sent others."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * 8)
    at = element(ROWS)
    total = tl.zeros([ROWS, 8], tl.int32)
    body = (first >> 3) * BITS
    left, end = remaining(n, first), remaining(nbytes, body)
    wires_ptr += body
    for rank in range(ranks):
        code = load_codes(wires_ptr, at * BITS, end, BITS, SPAN, True)
        beyond = (at >= left) & (code != 0)  # zero bits follow the last integer
        if tl.max(tl.max((beyond | (code > most)).to(tl.int32), axis=1), axis=0) > 0:
            tl.store(flags_ptr + rank, 1)
        total += code
        wires_ptr += nbytes
    total = tl.where(at < left, total, 0)
    store_codes(sums_ptr, (first >> 3) * SUM_BITS, sums_nbytes, total, SUM_BITS, COLUMNS, True, ROWS)


@triton.jit
def pack_kernel(signed_ptr, wire_ptr, nbytes, n, zero, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Levels int32 (n,) as packed codes level + zero."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * 8)
    at, left = element(ROWS), remaining(n, first)
    code = tl.where(at < left, tl.load(signed_ptr + first + at, mask=at < left, other=0) + zero, 0)
    store_codes(wire_ptr, (first >> 3) * BITS, nbytes, code, BITS, COLUMNS, True, ROWS)


@triton.jit
def blocks_kernel(
    x_ptr, sums_ptr, largest_ptr, segment_ptr, first_ptr, starts_ptr, sizes_ptr, first_out_ptr,
    BLOCK: tl.constexpr, WHAT: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of each run of BLOCK elements: bits of the largest |x|, or the sum of x^2 or |x|, in double.

    Moments are the largest, and the sums of x - x[0] and of its square (2,), with x[0] the tensor's first.
    """
    tile = tl.program_id(0)
    segment, first = tl.load(segment_ptr + tile), tl.load(first_ptr + tile)
    left = remaining(tl.load(sizes_ptr + segment), first)
    COUNT: tl.constexpr = (ROWS * 8) // BLOCK
    number = tl.arange(0, COUNT)
    at = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = tl.load(starts_ptr + segment)
    x = load_tile(x_ptr, start + first, at, left, MASKED, ALIGNED)
    to = tl.load(first_out_ptr + segment) + first // BLOCK + number
    inside = number * BLOCK < left
    if (WHAT == LARGEST) | (WHAT == MOMENTS):
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.store(largest_ptr + to, largest, mask=inside)
    if WHAT == SQUARES:
        wide = x.to(tl.float64)
        tl.store(sums_ptr + to, tl.sum(wide * wide, axis=1), mask=inside)
    if WHAT == SIZES:
        tl.store(sums_ptr + to, tl.sum(tl.abs(x).to(tl.float64), axis=1), mask=inside)
    if WHAT == MOMENTS:
        shifted = x.to(tl.float64) - tl.load(x_ptr + start).to(tl.float64)
        if MASKED:
            shifted = tl.where(at < left, shifted, 0.0)
        tl.store(sums_ptr + 2 * to, tl.sum(shifted, axis=1), mask=inside)
        tl.store(sums_ptr + 2 * to + 1, tl.sum(shifted * shifted, axis=1), mask=inside)


@triton.jit
def tensors_kernel(
    parts_ptr, largest_parts_ptr, sums_ptr, scales_ptr, first_part_ptr, counts_ptr,
    x_ptr, starts_ptr, sizes_ptr, clip, WHAT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of each tensor: the sum of its parts' sums, or the largest; of moments, `norms.limited_by`."""
    segment = tl.program_id(0)
    count, first = tl.load(counts_ptr + segment), tl.load(first_part_ptr + segment)
    number = tl.arange(0, SIZE)
    most = tl.zeros([SIZE], tl.int32)
    sums, squares = tl.zeros([SIZE], tl.float64), tl.zeros([SIZE], tl.float64)
    for i in range(0, count, SIZE):
        inside = i + number < count
        at = first + i + number
        if (WHAT == LARGEST) | (WHAT == MOMENTS):
            most = tl.maximum(most, tl.load(largest_parts_ptr + at, mask=inside, other=0))
        if (WHAT == SQUARES) | (WHAT == SIZES):
            sums += tl.load(parts_ptr + at, mask=inside, other=0.0)
        if WHAT == MOMENTS:
            sums += tl.load(parts_ptr + 2 * at, mask=inside, other=0.0)
            squares += tl.load(parts_ptr + 2 * at + 1, mask=inside, other=0.0)
    largest = tl.max(most, axis=0).to(tl.float32, bitcast=True)
    total = tl.sum(sums, axis=0)
    if (WHAT == SQUARES) | (WHAT == SIZES):
        tl.store(sums_ptr + segment, total)
    elif WHAT == LARGEST:
        tl.store(scales_ptr + segment, largest)
    else:
        size = tl.load(sizes_ptr + segment).to(tl.float64)
        shift = tl.load(x_ptr + tl.load(starts_ptr + segment)).to(tl.float64)
        variance = tl.maximum((tl.sum(squares, axis=0) - total * total / size) / size, 0.0)
        mean = shift + total / size
        deviation = tl.minimum(tl.sqrt(variance), 3.4028234663852886e38).to(tl.float32)
        root = tl.minimum(tl.sqrt(variance + mean * mean), 3.4028234663852886e38).to(tl.float32)
        limit = tl.maximum(clip * deviation, root)
        tl.store(scales_ptr + segment, tl.where((limit > 0) & (limit < largest), limit, largest))


@dataclass(frozen=True)
class Plan:
    """What launches for these tensors need. `tiles`: of whole tiles, and of those that need a mask."""

    at: Places
    tiles: tuple[tuple[int, bool, Tensor, Tensor], ...]  # how many, whether masked, segment, first
    columns: int
    aligned: bool  # each tensor begins at a multiple of 16 bytes, if the first element of x does
    inverse: tuple[float, float]


@lru_cache(maxsize=512)
def plan(segments: Segments, form: Form, device: torch.device) -> Plan:
    """Return the plan of these tensors, which all calls share."""
    full, last = tiles(segments.sizes, TILE, device)
    return Plan(
        at=places(segments, form, device),
        tiles=tuple(
            (len(which), masked, which.segment, which.first)
            for which, masked in ((full, False), (last, True))
            if len(which)
        ),
        columns=triton.next_power_of_2(form.bits),
        aligned=all(start % 4 == 0 for start in segments.starts),
        inverse=inverse(form.levels, form.levels),
    )


@lru_cache(maxsize=512)
def parts_of(segments: Segments, size: int, device: torch.device) -> Places:
    """Tables of the runs of `size` elements of which norms are taken first."""
    return places(segments, Form(1, size), device)


def norms(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    """Float32 (B,): one a block."""
    device = x.device
    if not (form.block == 0 or form.block in BLOCKS) or (measure.clip and form.block) or 0 in segments.sizes:
        return reference.norms(x, segments, form, measure)
    for_all = plan(segments, form, device)
    at, wide = for_all.at, aligned(for_all, x)
    if not at.units:
        return x.new_empty(0)
    what, columns = (MOMENTS.value, 2) if measure.clip else WHAT[measure.norm]
    size = form.block or TILE
    parts = parts_of(segments, size, device)
    sums = torch.empty(parts.blocks * columns, dtype=torch.float64, device=device)
    largest = torch.empty(parts.blocks if columns != 1 else 0, dtype=torch.int32, device=device)
    with dispatch.device_of(x):
        for count, masked, segment, first in for_all.tiles:
            launch(
                blocks_kernel, (count,), x, sums, largest, segment, first, at.starts, at.sizes,
                parts.first_block, size, what, masked, wide,
            )  # fmt: skip
        if not form.block:
            part_sums, sums = sums, torch.empty(len(segments), dtype=torch.float64, device=device)
            scales = torch.empty(len(segments), dtype=torch.float32, device=device)
            launch(
                tensors_kernel, (len(segments),), part_sums, largest, sums, scales, parts.first_block,
                parts.block_counts, x, at.starts, at.sizes, float(measure.clip), what, 1024,
            )  # fmt: skip
    if measure.norm == "max":
        return largest.view(torch.float32) if form.block else scales
    if measure.norm == "l2":
        return finished(sums.sqrt())
    return finished(sums / blocks_of(x, segments, form).sizes)


def quantise(x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other."""
    if not serves(form, measure):
        return reference.quantise(x, segments, keys, form, measure)
    at = plan(segments, form, x.device).at
    wire = torch.empty(at.nbytes, dtype=torch.uint8, device=x.device)
    scales: Tensor | None
    if form.base3:
        scales, levels = quantise_levels(x, segments, keys, form, measure)
        with dispatch.device_of(x):
            for count, segment, first in fives(segments, x.device):
                launch(
                    pack_base3_kernel, (count,), levels, wire, segment, first, at.sizes, at.body,
                    at.first_element, FIVES,
                )  # fmt: skip
    else:
        scales = None if measured(form, measure) else given(x, segments, form, measure)
        encode(x, segments, keys, form, wire, None, scales, scales is None)
    if scales is not None and at.blocks:
        heads = block_heads(segments, form, x.device)
        with dispatch.device_of(x):
            grid = (triton.cdiv(at.blocks, 512),)
            launch(put_scales_kernel, grid, wire, scales, heads, at.blocks, 512, num_warps=4)
    return wire


def quantise_levels(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> tuple[Tensor, Tensor]:
    """Scales float32 (B,) and signed levels int32 (K,)."""
    if not serves(form, measure):
        return reference.quantise_levels(x, segments, keys, form, measure)
    levels = torch.empty(segments.numel, dtype=torch.int32, device=x.device)
    inside = measured(form, measure)
    if inside:
        blocks = plan(segments, form, x.device).at.blocks
        scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    else:
        scales = given(x, segments, form, measure)
    encode(x, segments, keys, form, None, levels, scales, inside)
    return scales, levels


def encode(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form,
    wire: Tensor | None, levels: Tensor | None, scales: Tensor | None, inside: bool,
) -> None:  # fmt: skip
    """Write codes to the wire, or levels; where the scales are measured `inside`, them too."""
    for_all = plan(segments, form, x.device)
    at, wide = for_all.at, aligned(for_all, x)
    flags = torch.zeros(len(segments), dtype=torch.int32, device=x.device)
    on_device = device_keys(keys, segments, x.device)
    with dispatch.device_of(x):
        for count, masked, segment, first in for_all.tiles:
            launch(
                quantise_kernel, (count,), x, x if wire is None else wire, x if levels is None else levels,
                x if scales is None else scales, flags, on_device, segment, first, at.starts,
                at.sizes, at.head, at.body, at.body_end, at.first_block, at.first_element, form.block,
                form.levels, form.bits, for_all.columns, form.powers, form.block,
                MEASURED.value if inside else source(form), wire is None, masked, wide,
                num_warps=16 if masked or not wide else 8,  # for kernels of many registers
            )  # fmt: skip
    deferred.check(flags, partial(_not_finite, segments))


def _not_finite(segments: Segments, number: int) -> Exception:
    return reference.not_finite(number, segments)


def dequantise_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    """out += alpha * values of each message, in order; nothing of one that is damaged."""
    for_all = plan(segments, form, out.device)
    at, wide = for_all.at, aligned(for_all, out)
    for number, wire in enumerate(wires):
        if wire.numel() != at.nbytes:
            error = WireError(f"a message of {at.nbytes} bytes is expected, got {wire.numel()}")
            error.message = number
            raise error
    if not at.units:
        return out
    stacked, stride = one_buffer(wires)
    count = len(wires)
    flags = torch.zeros(3 * count + 1, dtype=torch.int32, device=out.device)
    scales = torch.empty(count * at.blocks, dtype=torch.float32, device=out.device)
    heads, tails = block_heads(segments, form, out.device), at.tails.numel()
    with dispatch.device_of(out):
        launch(
            get_scales_kernel, (-(-max(at.blocks, tails) // 512), count), stacked, stride, scales, heads,
            at.blocks, at.tails, at.tail_limits, tails, flags, 512, num_warps=4,
        )  # fmt: skip
        if form.base3:
            for tiles_, segment, first in fives(segments, out.device):
                launch(
                    check_base3_kernel, (tiles_, count), stacked, stride, flags, segment, first, at.body,
                    at.body_end, FIVES,
                )  # fmt: skip
        elif form.levels & form.levels + 1:
            for tiles_, _, segment, first in for_all.tiles:
                launch(
                    check_levels_kernel, (tiles_, count), stacked, stride, flags, segment, first, at.sizes,
                    at.body, at.body_end, form.levels, form.bits, spanned(form.bits),
                )  # fmt: skip
        for tiles_, masked, segment, first in for_all.tiles:
            launch(
                dequantise_kernel, (tiles_,), stacked, stride, count, scales, at.blocks, flags, out,
                segment, first, at.starts, at.sizes, at.body, at.body_end, at.first_block, float(alpha),
                form.levels, form.bits, form.powers, *for_all.inverse, form.block, form.base3, masked,
                wide,
            )  # fmt: skip
    deferred.check(flags, partial(damaged, form))
    return out


def dequantises(form: Form) -> bool:
    """Whether `dequantise_messages_add_` serves this form."""
    return form.block % 8 == 0


def damaged(form: Form, number: int) -> WireError:
    """The error of flag `number`, three for each message."""
    message, kind = divmod(number, 3)
    error = WireError(
        (
            "the scale of a block is negative or not finite",
            "five levels make a byte of at most 242, got a larger one"
            if form.base3
            else f"there are levels up to {form.levels}, got a larger one",
            "what follows the last code of a tensor must be zero",
        )[kind]
    )
    error.message = message
    return error


def levels_add_(
    signed: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    """out += alpha * values of signed levels int32 (K,)."""
    if form.block % 8:
        return reference.levels_add_(signed, scales, segments, out, form, alpha)
    return add_levels_(signed, 0, 0, scales, None, segments, out, form, alpha)


def add_levels_(
    signed: Tensor, bits: int, zero: int, scales: Tensor, flags: Tensor | None,
    segments: Segments, out: Tensor, form: Form, alpha: float, fresh: bool = False,
) -> Tensor:  # fmt: skip
    """out += alpha * values of levels int32 (K,), or of packed codes of `bits` that stand for code - zero.

    fresh: out is taken for 0 before.
    """
    for_all = plan(segments, form, out.device)
    at, wide = for_all.at, aligned(for_all, out)
    used = segments.numel * bits % 8 or 8  # of the last byte
    with dispatch.device_of(out):
        for count, masked, segment, first in for_all.tiles:
            launch(
                levels_kernel, (count,), signed, signed.numel(), used, zero, scales,
                signed if flags is None else flags, out, segment, first, at.starts, at.sizes,
                at.first_element, at.first_block, float(alpha), form.levels, bits, form.powers,
                *inverse(form.levels, zero), form.block, fresh, masked, wide,
            )  # fmt: skip
    return out


def pack_levels(signed: Tensor, zero: int, bits: int) -> Tensor:
    """Levels int32 (n,) as packed codes level + zero of so many bits: uint8."""
    n = signed.numel()
    wire = torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=signed.device)
    if n:
        columns = triton.next_power_of_2(bits)
        with dispatch.device_of(signed):
            launch(pack_kernel, (-(-n // TILE),), signed, wire, wire.numel(), n, zero, bits, columns)
    return wire


def packed_sum(wires: Tensor, n: int, most: int, bits: int, sum_bits: int) -> tuple[Tensor, Tensor]:
    """Sums of wires uint8 (ranks, m) of packed integers, packed; and a flag for each rank."""
    ranks, nbytes = wires.shape
    sums = torch.empty((n * sum_bits + 7) // 8, dtype=torch.uint8, device=wires.device)
    flags = torch.zeros(ranks, dtype=torch.int32, device=wires.device)
    if n:
        with dispatch.device_of(wires):
            launch(
                packed_sum_kernel, (-(-n // TILE),), wires, nbytes, ranks, sums, sums.numel(), flags, n,
                most, bits, spanned(bits), sum_bits, triton.next_power_of_2(sum_bits),
            )  # fmt: skip
    return sums, flags


def measured(form: Form, measure: Measure) -> bool:
    """Whether the scales are found while a tile is quantised."""
    return measure.scales is None and measure.norm == "max" and not measure.clip and form.block in BLOCKS


def serves(form: Form, measure: Measure) -> bool:
    """Whether there is a kernel for it: no floors, and no two scales in a row of eight."""
    return measure.floors is None and form.block % 8 == 0


def given(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    """The scales that were given, or else the norms."""
    return norms(x, segments, form, measure) if measure.scales is None else measure.scales


def source(form: Form) -> Any:
    """Where a kernel finds the scales of elements."""
    return ONE_A_ROW.value if form.block else ONE_A_TENSOR.value


@lru_cache(maxsize=512)
def inverse(levels: int, most: int) -> tuple[float, float]:
    """float32 high, low: k * high + k * low is k / levels, rounded three times or once, for k = 0..most.

    low = 0: k * high is. Both 0: there are none, or too many k to try them.
    """
    if not 0 < most < 1 << 15:
        return 0.0, 0.0
    k = np.arange(most + 1, dtype=np.float32)
    wanted = k / np.float32(levels)
    near = np.float32(1 / levels)
    for one in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))):
        if np.array_equal(k * one, wanted):
            return float(one), 0.0
    part = 24 - most.bit_length()  # bits of a factor whose products are exact
    mantissa, exponent = np.frexp(1 / levels)
    high = np.float32(np.ldexp(np.round(np.ldexp(mantissa, part)), exponent - part))
    low = np.float32(1 / levels - float(high))
    return (float(high), float(low)) if np.array_equal(k * high + k * low, wanted) else (0.0, 0.0)


def spanned(bits: int) -> int:
    """Bytes in which a code of so many bits may lie."""
    return max(1, -(-bits // 8)) if bits in (0, 1, 2, 4, 8, 16) else (bits + 14) // 8


@lru_cache(maxsize=512)
def fives(segments: Segments, device: torch.device) -> tuple[tuple[int, Tensor, Tensor], ...]:
    """Tiles of FIVES bytes of five elements: how many, segment, first; whole ones, then the last ones."""
    both = tiles(segments.sizes, 5 * FIVES, device)
    return tuple((len(which), which.segment, which.first) for which in both if len(which))


def aligned(for_all: Plan, x: Tensor) -> bool:
    """Whether each tensor begins at a multiple of 16 bytes."""
    return for_all.aligned and x.data_ptr() % 16 == 0


@lru_cache(maxsize=512)
def block_heads(segments: Segments, form: Form, device: torch.device) -> Tensor:
    """Place of each block's scale in the wire: int64 (B,). The tensor is shared: do not change it."""
    at: Places = places(segments, form, device)
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    inside = torch.arange(at.blocks, dtype=torch.int64, device=device) - at.first_block[of]
    return at.head[of] + 4 * inside


def one_buffer(wires: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The first message, and how many bytes apart they lie in memory. Copies them if that differs."""
    places_ = [wire.data_ptr() for wire in wires]
    apart = places_[1] - places_[0] if len(wires) > 1 else 0
    if all(later - earlier == apart for earlier, later in pairwise(places_)):
        return wires[0], apart
    return torch.cat(list(wires)), wires[0].numel()
