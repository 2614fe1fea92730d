"""Triton kernels that validate and add messages."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from laconic.kernels.minmax.gpu_tile import INFINITE, MAGNITUDE, block_numbers, by_row, load32, row_numbers

KINDS = tl.constexpr(3)


@triton.jit(do_not_specialize=["stride", "any_flag"])  # type: ignore[untyped-decorator]
def validate_kernel(  # type: ignore[no-untyped-def]
    wire_ptr,
    stride,
    flags_ptr,
    table_ptr,
    any_flag,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Check blocks' heads (unit, low: float32) and a tensor's last byte; set its message's flags."""
    part = table_ptr + tl.program_id(0) * 6  # columns: `gpu_tables._heads`
    start, count, last = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    used, message = tl.load(part + 3).to(tl.int32), tl.load(part + 4) + tl.program_id(1)
    wire = wire_ptr + tl.program_id(1).to(tl.int64) * stride
    i = tl.arange(0, CHUNK)
    mask = i < count
    at = wire + start + i * 8
    unit, low = load32(at, mask, WORDS), load32(at + 4, mask, WORDS)
    wrong = (unit < 0) | (unit >= INFINITE) | ((low & MAGNITUDE) >= INFINITE)
    end = low.to(tl.float32, bitcast=True) + unit.to(tl.float32, bitcast=True) * MOST
    endless = (end.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE
    last_byte = tl.load(wire + last + i * 0, mask=i == 0, other=0).to(tl.int32)  # i * 0 broadcasts
    padded = (last_byte >> used) != 0
    flag = flags_ptr + message * KINDS + i * 0
    one = i * 0 + 1
    tl.store(flag, one, mask=wrong)
    tl.store(flag + 1, one, mask=endless)
    tl.store(flag + 2, one, mask=padded)
    tl.store(flags_ptr + any_flag + i * 0, one, mask=wrong | endless | padded)


@triton.jit(do_not_specialize=["base", "stride", "any_flag"])  # type: ignore[untyped-decorator]
def add_kernel(  # type: ignore[no-untyped-def]
    wire_ptr,
    base,
    stride,
    flags_ptr,
    any_flag,
    out_ptr,
    table_ptr,
    alpha,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    if tl.load(flags_ptr + any_flag) == 0:
        tile = table_ptr + tl.program_id(0) * 6  # columns: `_tiles`
        start, head, body = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        count = tl.load(tile + 4).to(tl.int32)
        if ALIGNED:
            start = (start >> 2) * 4  # a multiple of 4, for the compiler
        row, column = row_numbers(), tl.arange(0, 4)[None, :]
        place = row[:, None] * 4 + column
        block = block_numbers(BLOCK)
        here = block * BLOCK < count
        each: tl.constexpr = WIDTH // 2
        if MASKED:
            inside = place < count
            total = tl.load(out_ptr + start + place, mask=inside, other=0.0)
        else:
            total = tl.load(out_ptr + start + place)
        for number in tl.static_range(COUNT):
            wire = wire_ptr + base + stride.to(tl.int64) * number
            at = wire + head + block * 8
            unit = load32(at, here, WORDS).to(tl.float32, bitcast=True)
            low = load32(at + 4, here, WORDS).to(tl.float32, bitcast=True)
            source = wire + body + row * each
            if WORDS and WIDTH == 4:
                packed = tl.load(source.to(tl.pointer_type(tl.int16))).to(tl.int32)
            elif WORDS and WIDTH == 8:
                packed = tl.load(source.to(tl.pointer_type(tl.int32)))
            else:
                packed = row * 0
                for i in tl.static_range(each):
                    if MASKED:
                        left = row * each + i < (count * WIDTH + 7) // 8
                        byte = tl.load(source + i, mask=left, other=0)
                    else:
                        byte = tl.load(source + i)
                    packed |= byte.to(tl.int32) << (8 * i)
            code = (packed[:, None] >> (column * WIDTH)) & ((1 << WIDTH) - 1)
            value = by_row(low, BLOCK)[:, None] + code.to(tl.float32) * by_row(unit, BLOCK)[:, None]
            total += value * alpha
        if MASKED:
            tl.store(out_ptr + start + place, total, mask=inside)
        else:
            tl.store(out_ptr + start + place, total)
