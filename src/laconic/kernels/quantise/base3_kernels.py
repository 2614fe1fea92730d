"""Triton kernels of ternary codes."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.quantise.tile import remaining

FIVES = 1024  # bytes of a tile of digits


@triton.jit
def pack_base3_kernel(
    levels_ptr, wire_ptr, segment_ptr, first_ptr, sizes_ptr, body_ptr, first_element_ptr, SIZE: tl.constexpr
):
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
    """Set flag 1 if a byte exceeds five digits."""
    message = tl.program_id(1).to(tl.int64)  # stride times it exceeds an i32
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
    """Return float32 -1, 0, 1 of elements first + at."""
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
