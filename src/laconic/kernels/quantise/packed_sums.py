"""Triton kernels that pack levels, add packed levels of ranks, and decode sums."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.quantise.decode_kernels import FOURS, block_of, quotient
from laconic.kernels.quantise.form import Form
from laconic.kernels.quantise.plan import aligned, inverse, plan
from laconic.kernels.quantise.tile import (
    ROWS,
    TILE,
    element,
    load_codes,
    load_tile,
    remaining,
    spanned,
    store_codes,
)


@triton.jit
def pack_kernel(signed_ptr, wire_ptr, nbytes, n, zero, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (ROWS * 8)
    at, left = element(ROWS), remaining(n, first)
    code = tl.where(at < left, tl.load(signed_ptr + first + at, mask=at < left, other=0) + zero, 0)
    store_codes(wire_ptr, (first >> 3) * BITS, nbytes, code, BITS, COLUMNS, True, ROWS)


@triton.jit
def packed_sum_kernel(
    wires_ptr, nbytes, ranks, sums_ptr, sums_nbytes, flags_ptr, n, most,
    BITS: tl.constexpr, SPAN: tl.constexpr, SUM_BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pack sums over ranks of integers in 0..most. Flag r: rank r sent a larger one or nonzero padding."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * 8)
    at = element(ROWS)
    total = tl.zeros([ROWS, 8], tl.int32)
    body = (first >> 3) * BITS
    left, end = remaining(n, first), remaining(nbytes, body)
    wires_ptr += body
    for rank in range(ranks):
        code = load_codes(wires_ptr, at * BITS, end, BITS, SPAN, True)
        beyond = (at >= left) & (code != 0)
        if tl.max(tl.max((beyond | (code > most)).to(tl.int32), axis=1), axis=0) > 0:
            tl.store(flags_ptr + rank, 1)
        total += code
        wires_ptr += nbytes
    total = tl.where(at < left, total, 0)
    store_codes(sums_ptr, (first >> 3) * SUM_BITS, sums_nbytes, total, SUM_BITS, COLUMNS, True, ROWS)


@triton.jit
def value_of(
    signed, scale, LEVELS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr
):
    if POWERS:
        size = ((127 + tl.abs(signed) - LEVELS) << 23).to(tl.float32, bitcast=True)
        size = tl.where(signed != 0, size, 0.0)
        return tl.where(signed < 0, -size, size) * scale
    return quotient(signed.to(tl.float32), LEVELS, HIGH, LOW) * scale


@triton.jit
def levels_kernel(
    signed_ptr, end, used, zero, scales_ptr, flags_ptr, out_ptr, segment_ptr, first_ptr,
    starts_ptr, sizes_ptr, first_element_ptr, first_block_ptr, alpha,
    LEVELS: tl.constexpr, BITS: tl.constexpr, POWERS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, FRESH: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add alpha * values of levels.

    Levels are int32 if BITS is 0, else packed codes level + zero; only `used` bits of the last byte may be
    set. FRESH: overwrite out.
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
        if BITS <= 14:  # a word holds four codes
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


def pack_levels(signed: Tensor, zero: int, bits: int) -> Tensor:
    n = signed.numel()
    wire = torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=signed.device)
    if n:
        columns = triton.next_power_of_2(bits)
        with dispatch.device_of(signed):
            launch(pack_kernel, (-(-n // TILE),), signed, wire, wire.numel(), n, zero, bits, columns)
    return wire


def packed_sum(wires: Tensor, n: int, most: int, bits: int, sum_bits: int) -> tuple[Tensor, Tensor]:
    """Return packed sums, and a flag per rank."""
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


def add_levels_(
    signed: Tensor, bits: int, zero: int, scales: Tensor, flags: Tensor | None,
    segments: Segments, out: Tensor, form: Form, alpha: float, fresh: bool = False,
) -> Tensor:  # fmt: skip
    for_all = plan(segments, form, out.device)
    at, wide = for_all.at, aligned(for_all, out)
    used = segments.numel * bits % 8 or 8
    with dispatch.device_of(out):
        for count, masked, segment, first in for_all.tiles:
            launch(
                levels_kernel, (count,), signed, signed.numel(), used, zero, scales,
                signed if flags is None else flags,  # unused without packed codes
                out, segment, first, at.starts, at.sizes,
                at.first_element, at.first_block, float(alpha), form.levels, bits, form.powers,
                *inverse(form.levels, zero), form.block, fresh, masked, wide,
            )  # fmt: skip
    return out
