# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Triton kernels of signs and mean magnitudes.

A tile is 512 rows of 8 elements: one byte of signs each. See `plan` for the tables.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column(table, column, tiles, tile):
    return tl.load(table + column * tiles + tile)


@triton.jit
def _store_word(at, word, mask):
    for i in tl.static_range(4):
        tl.store(at + i, ((word >> (8 * i)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _load_word(at, mask):
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(at + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def _not_finite(word):
    return (word & 0x7F800000) == 0x7F800000


@triton.jit
def _coins(key, first):
    """Return coins of 4,096 elements from `first`, a multiple of 128."""
    counter = (first >> 7) + tl.arange(0, 32)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, low * 0, low * 0)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (128, 1))
    byte = (word >> (8 * tl.arange(0, 4)[None, :]).to(tl.uint32)) & 255
    return tl.reshape(byte, (512,)).to(tl.int32)


@triton.jit
def encode_kernel(
    x_ptr,
    wire_ptr,
    flag_ptr,
    partial_ptr,
    keys_ptr,
    table_ptr,
    tiles,
    opposite,
    BLOCK: tl.constexpr,
    TOSS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store signs and means, or for BLOCK 0 a tile's sum."""
    tile = tl.program_id(0)
    start = _column(table_ptr, 0, tiles, tile)
    bits_at = _column(table_ptr, 1, tiles, tile)
    if ALIGNED:
        start = (start >> 2) * 4
    row = tl.arange(0, 512)
    column = tl.arange(0, 8)[None, :]
    place = row[:, None] * 8 + column
    count = _column(table_ptr, 5, tiles, tile).to(tl.int32) if MASKED else 4096
    if MASKED:
        x = tl.load(x_ptr + start + place, mask=place < count, other=0.0)
    else:
        x = tl.load(x_ptr + start + place)
    pattern = x.to(tl.int32, bitcast=True)
    byte = tl.sum(((pattern >> 31) & 1) << column, axis=1)
    if TOSS:
        zero = (pattern & 0x7FFFFFFF) == 0
        if MASKED:
            zero = zero & (place < count)
        zeros = tl.sum(zero.to(tl.int32) << column, axis=1)
        if tl.max(zeros, axis=0) > 0:
            key = tl.load(keys_ptr + _column(table_ptr, 3, tiles, tile))
            coins = _coins(key, _column(table_ptr, 4, tiles, tile)) ^ opposite
            byte = (byte & ~zeros) | (coins & zeros)
    if MASKED:
        tl.store(wire_ptr + bits_at + row, byte.to(tl.uint8), mask=row * 8 < count)
    else:
        tl.store(wire_ptr + bits_at + row, byte.to(tl.uint8))
    sums = tl.sum(tl.abs(x).to(tl.float64), axis=1)
    if BLOCK == 0:
        tl.store(partial_ptr + _column(table_ptr, 6, tiles, tile), tl.sum(sums, axis=0))
    else:
        block = tl.arange(0, 4096 // BLOCK)
        length = tl.minimum(tl.maximum(count - block * BLOCK, 0), BLOCK)
        total = tl.sum(tl.reshape(sums, (4096 // BLOCK, BLOCK // 8)), axis=1)
        mean = (total / tl.maximum(length, 1).to(tl.float64)).to(tl.float32).to(tl.int32, bitcast=True)
        head = wire_ptr + _column(table_ptr, 2, tiles, tile) + 4 * block
        _store_word(head, mean, length > 0)
        if tl.max(_not_finite(mean).to(tl.int32), axis=0) > 0:
            tl.store(flag_ptr, 1)


@triton.jit
def mean_kernel(wire_ptr, flag_ptr, partial_ptr, table_ptr, tensors):
    tensor = tl.program_id(0)
    slot = _column(table_ptr, 0, tensors, tensor)
    slots = _column(table_ptr, 1, tensors, tensor)
    length = _column(table_ptr, 2, tensors, tensor)
    lane = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float64)
    for at in range(0, slots, 256):
        total += tl.load(partial_ptr + slot + at + lane, mask=at + lane < slots, other=0.0)
    mean = (tl.sum(total, axis=0) / tl.maximum(length, 1).to(tl.float64)).to(tl.float32)
    word = mean.to(tl.int32, bitcast=True)
    _store_word(wire_ptr + _column(table_ptr, 3, tensors, tensor), word, length >= 0)
    if _not_finite(word):
        tl.store(flag_ptr, 1)


@triton.jit
def validate_kernel(
    wires_ptr,
    flags_ptr,
    table_ptr,
    tiles,
    messages,
    BLOCK: tl.constexpr,
    MEANS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Set flags for bad means and nonzero padding."""
    message = tl.program_id(1)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    wire = tl.load(wires_ptr + message).to(tl.pointer_type(tl.uint8))
    count = tl.load(table_ptr + 5 * tiles + tile, mask=inside, other=0).to(tl.int32)
    bits_at = tl.load(table_ptr + tiles + tile, mask=inside, other=0)
    if MEANS:
        SCALES: tl.constexpr = 1 if BLOCK == 0 else 4096 // BLOCK
        head_at = tl.load(table_ptr + 2 * tiles + tile, mask=inside, other=0)
        block = tl.arange(0, SCALES)[None, :]
        present = (block * BLOCK < count[:, None]) & inside[:, None]
        mean = _load_word(wire + head_at[:, None] + 4 * block, present)
        bad = (_not_finite(mean) | (mean < 0)).to(tl.int32)
        if tl.max(tl.max(bad, axis=1), axis=0) > 0:
            tl.store(flags_ptr + 2 * message, 1)
            tl.store(flags_ptr + 2 * messages, 1)
    partial = (count & 7) > 0
    last = tl.load(wire + bits_at + (count >> 3), mask=partial & inside, other=0).to(tl.int32)
    if tl.max(last >> (count & 7), axis=0) > 0:
        tl.store(flags_ptr + 2 * message + 1, 1)
        tl.store(flags_ptr + 2 * messages, 1)


@triton.jit
def add_kernel(
    out_ptr,
    wires_ptr,
    flags_ptr,
    table_ptr,
    tiles,
    messages,
    alpha,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    if tl.load(flags_ptr + 2 * messages) == 0:
        tile = tl.program_id(0)
        start = _column(table_ptr, 0, tiles, tile)
        bits_at = _column(table_ptr, 1, tiles, tile)
        head_at = _column(table_ptr, 2, tiles, tile)
        if ALIGNED:
            start = (start >> 2) * 4
        row = tl.arange(0, 512)
        column = tl.arange(0, 8)[None, :]
        place = row[:, None] * 8 + column
        count = _column(table_ptr, 5, tiles, tile).to(tl.int32) if MASKED else 4096
        if MASKED:
            total = tl.load(out_ptr + start + place, mask=place < count, other=0.0)
        else:
            total = tl.load(out_ptr + start + place)
        for message in range(messages):
            wire = tl.load(wires_ptr + message).to(tl.pointer_type(tl.uint8))
            if MASKED:
                byte = tl.load(wire + bits_at + row, mask=row * 8 < count, other=0).to(tl.int32)
            else:
                byte = tl.load(wire + bits_at + row).to(tl.int32)
            if BLOCK == 0 or BLOCK == 4096:
                mean = _load_word(wire + head_at, head_at >= 0).to(tl.float32, bitcast=True) * alpha
                value = tl.zeros((512,), tl.float32) + mean
            else:
                at = wire + head_at + (row * 8 // BLOCK) * 4
                value = _load_word(at, row * 8 < count).to(tl.float32, bitcast=True) * alpha
            mask = (byte[:, None] >> column) << 31
            total += (value.to(tl.int32, bitcast=True)[:, None] ^ mask).to(tl.float32, bitcast=True)
        if MASKED:
            tl.store(out_ptr + start + place, total, mask=place < count)
        else:
            tl.store(out_ptr + start + place, total)
