"""Tiles in Triton: 512 rows of 8 elements, which fill whole bytes and share a Philox counter."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

TILE = 4096
ROWS = tl.constexpr(TILE // 8)


@triton.jit
def element(rows: tl.constexpr):
    return tl.arange(0, rows)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def remaining(end, begin):
    """Return end - begin as int32, limited to more than any tile needs."""
    return tl.minimum(end - begin, 1 << 20).to(tl.int32)


@triton.jit
def load_tile(x_ptr, base, at, left, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        base = (base >> 2) * 4
    if MASKED:
        return tl.load(x_ptr + base + at, mask=at < left, other=0.0)
    return tl.load(x_ptr + base + at)


@triton.jit
def store_codes(
    wire_ptr, body, end, code,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Store rows of eight codes as BITS bytes, from byte `body` up to `end`."""
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
def load_codes(wire_ptr, bit, end, BITS: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr):
    """Load codes from `bit` on, each in SPAN bytes; bytes from `end` on are zero."""
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


def spanned(bits: int) -> int:
    return max(1, -(-bits // 8)) if bits in (0, 1, 2, 4, 8, 16) else (bits + 14) // 8
