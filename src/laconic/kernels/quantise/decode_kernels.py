"""Triton kernels of the decoder."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.quantise.base3_kernels import ternary
from laconic.kernels.quantise.tile import ROWS, TILE, element, load_codes, load_tile, remaining

FOURS = tl.constexpr(TILE // 4)  # words of four codes


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
    """Read and check scales and padding.

    A message has three flags: 0 scale, 1 code, 2 padding. One more is set if any is.
    """
    message = tl.program_id(1).to(tl.int64)  # message * stride can exceed int32
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
    message = tl.program_id(1).to(tl.int64)
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
    """Load four codes per word: uint32, or uint64 above 8 bits. Bytes from `end` on are zero."""
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
    """Return the values float32 (fours, 4) of codes [sign 1 | level], at scale 1."""
    column = tl.arange(0, 4)[None, :]
    code = (word[:, None] >> (column * BITS).to(word.dtype)).to(tl.uint32)
    level = code & ((1 << (BITS - 1)) - 1)
    sign = (code << (32 - BITS)) & 0x80000000
    if POWERS:
        size = ((level + (127 - LEVELS)) << 23) | sign
        return tl.where(level != 0, size, 0).to(tl.float32, bitcast=True)
    # +-(2^23 + level) -+ 2^23: faster than a conversion; 0 has no sign
    size = (level | sign | 0x4B000000).to(tl.float32, bitcast=True)
    size += (sign ^ 0xCB000000).to(tl.float32, bitcast=True)
    return quotient(size, LEVELS, HIGH, LOW)


@triton.jit
def quotient(size, LEVELS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Return size / LEVELS, by the factors of `plan.inverse`."""
    if LEVELS == 1:
        return size
    if HIGH == 0:
        return tl.div_rn(size, tl.zeros_like(size) + LEVELS)
    if LOW == 0:
        return size * HIGH
    return size * HIGH + size * LOW


@triton.jit
def block_of(first, left, BLOCK: tl.constexpr):
    """Return the block of each four elements: (FOURS or 1, 1)."""
    if BLOCK == 0:
        return tl.zeros([1, 1], tl.int64)
    else:  # noqa: RET505 - Triton wants one type
        inside = tl.minimum(tl.arange(0, FOURS) * 4, left - 1).to(tl.uint32)
        return (first // BLOCK + ((first % BLOCK).to(tl.uint32) + inside) // BLOCK)[:, None]


@triton.jit
def dequantise_kernel(
    wire_ptr, stride, messages, scales_ptr, count, flags_ptr, out_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, body_ptr, end_ptr, first_block_ptr, alpha,
    LEVELS: tl.constexpr, BITS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, BASE3: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
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
