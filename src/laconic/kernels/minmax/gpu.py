"""Min-max on a GPU: one launch for whole tiles of all tensors and all messages, one for the shorter rest.

A tile is 4,096 elements in 1,024 rows of four. Row number rep * 256 + warp * 32 + lane of Triton's layout is
row warp * 128 + rep * 32 + lane of the tile: a block of 512 elements is in one warp, which finds its extremes
without shared memory. Each row makes its own random words, so none are moved between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.framing import consecutive
from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.minmax.dither import on_device
from laconic.kernels.minmax.faults import FAULTS, check_flags
from laconic.kernels.minmax.form import MinMaxForm, minmax_nbytes
from laconic.kernels.minmax.reference import not_finite
from laconic.kernels.minmax.rows import apart

TILE, CHUNK = 4096, 256  # elements of a tile; heads that a program of `validate` reads
STACK = 8  # messages of the same segments that one launch adds
COLUMNS = 6  # of a table: see `_rows`

ROWS = tl.constexpr(1024)
INFINITE = tl.constexpr(0x7F800000)  # bits of |x|, from which on x is Inf or NaN
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
FARTHEST = tl.constexpr(2.0**126)
LOWER_KEY = tl.constexpr(0xD1B54A32D192ED03 - (1 << 64))
KINDS = tl.constexpr(3)


@dataclass(frozen=True)
class Tables:
    """Tables int64 (t, 6) of whole tiles, of shorter ones and of heads, on a device."""

    whole: Tensor
    rest: Tensor
    heads: Tensor
    aligned: bool  # all starts are multiples of 4 elements
    words: bool  # all heads and levels start at multiples of 4 bytes

    @cached_property
    def tiles(self) -> tuple[tuple[Tensor, tuple[int], bool], ...]:
        """The tables of tiles that are not empty, with the grid, and whether their tiles are masked."""
        both = ((self.whole, False), (self.rest, True))
        return tuple((table, (len(table),), masked) for table, masked in both if len(table))


def encode(x: Tensor, segments: Segments, keys: Tensor | None, form: MinMaxForm) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other; keys int64 (s,) on the CPU, if needed."""
    width, device = form.widths[0], x.device
    tables = _tables((segments,), (0,), width, form.block, device, True)
    wire = torch.empty(form.message_nbytes(segments), dtype=torch.uint8, device=device)
    flags = torch.zeros(len(segments), dtype=torch.int32, device=device)
    drawn = on_device(keys, device) if keys is not None and form.stochastic else flags
    fast = tables.aligned and x.data_ptr() % 16 == 0
    with dispatch.device_of(x):
        for table, grid, masked in tables.tiles:
            words = tables.words and not masked
            constants = (width, form.block, form.stochastic, masked, fast, words)
            launch(encode_kernel, grid, x, wire, drawn, flags, table, *constants)
    check(flags, lambda number: not_finite(number, segments))
    return wire


@dataclass(frozen=True)
class Plan:
    """Launches that add some messages: `stride` is the bytes of each of `copies` messages of equal segments.

    `rounds`: tables, the first byte of the first message, and how many messages of equal segments.
    """

    heads: Tables
    rounds: tuple[tuple[Tables, int, int], ...]
    copies: int
    stride: int
    width: int
    block: int
    faults: int  # flags of faults; one more says whether there is any


def add_messages_(
    wires: Sequence[Tensor],
    ranges: tuple[Segments, ...],
    out: Tensor,
    forms: tuple[MinMaxForm, ...],
    alpha: float,
    numbered: bool = True,
) -> Tensor:
    """out += alpha * values of all messages in order; writes nothing where any of them is not valid."""
    plan = _plan(ranges, forms, out.device)
    wire = consecutive(wires)
    flags = torch.zeros(plan.faults + 1, dtype=torch.int32, device=out.device)
    words, fast = wire.data_ptr() % 4 == 0, out.data_ptr() % 16 == 0
    with dispatch.device_of(out):
        heads, most = plan.heads, float((1 << plan.width) - 1)
        parts = (len(heads.heads), plan.copies)
        constants = (most, CHUNK, words and heads.words)
        launch(
            validate_kernel,
            parts,
            wire,
            plan.stride,
            flags,
            heads.heads,
            plan.faults,
            *constants,
            num_warps=4,
        )
        for tables, base, count in plan.rounds:
            for table, grid, masked in tables.tiles:
                how = (masked, fast and tables.aligned, words and tables.words and not masked)
                sizes = (count, plan.width, plan.block)
                launch(
                    add_kernel,
                    grid,
                    wire,
                    base,
                    plan.stride,
                    flags,
                    plan.faults,
                    out,
                    table,
                    float(alpha),
                    *sizes,
                    *how,
                )
    check_flags(flags, numbered)
    return out


@lru_cache(maxsize=256)
def _plan(ranges: tuple[Segments, ...], forms: tuple[MinMaxForm, ...], device: torch.device) -> Plan:
    """Launches for messages of these segments, one after the other in one tensor of bytes."""
    block, width = forms[0].block, next(form.widths[0] for form in forms if form.widths)
    nbytes = [form.message_nbytes(segments) for segments, form in zip(ranges, forms, strict=True)]
    begins = tuple(accumulate(nbytes, initial=0))[:-1]
    copies, stride = 1, 0
    if all(each == ranges[0] for each in ranges):
        copies, stride = len(ranges), nbytes[0]
        every = _tables(ranges[:1], (0,), width, block, device, False, stride)
        firsts = range(0, copies, STACK)
        rounds = tuple((every, at * stride, min(STACK, copies - at)) for at in firsts)
    else:
        every = _tables(ranges, begins, width, block, device, False)
        rounds = ((every, 0, 1),)
        if not apart(ranges):
            pairs = zip(ranges, begins, strict=True)
            rounds = tuple((_tables((each,), (at,), width, block, device, False), 0, 1) for each, at in pairs)
    return Plan(every, rounds, copies, stride, width, block, len(ranges) * len(FAULTS))


@lru_cache(maxsize=256)
def _tables(
    messages: tuple[Segments, ...],
    begins: tuple[int, ...],
    width: int,
    block: int,
    device: torch.device,
    by_tensor: bool,
    stride: int = 0,
) -> Tables:
    """Tables of messages of these segments; a tile has the number of its tensor, or of its message."""
    whole, rest, heads = [], [], []
    for message, (segments, begin) in enumerate(zip(messages, begins, strict=True)):
        at = begin
        for tensor, (start, n) in enumerate(segments):
            if n:
                body = at + minmax_nbytes(n, 0, block)
                end = at + minmax_nbytes(n, width, block)
                number = tensor if by_tensor else message
                tiles = _rows(start, at, body, n, number, width, block)
                whole.append(tiles[: n // TILE])
                rest.append(tiles[n // TILE :])
                heads.append(_heads(at, body, end, n * width % 8, number))
                at = end
    every = np.concatenate([*whole, *rest, np.empty((0, COLUMNS), dtype=np.int64)])
    return Tables(
        _table(whole, device),
        _table(rest, device),
        _table(heads, device),
        bool((every[:, 0] % 4 == 0).all()),
        bool((every[:, 1:3] % 4 == 0).all()) and stride % 4 == 0,
    )


def _rows(start: int, head: int, body: int, n: int, number: int, width: int, block: int) -> Any:
    """Tiles of a tensor: start in the buffer, of heads, of levels; first element, elements, number."""
    first = np.arange(0, n, TILE, dtype=np.int64)
    columns = (
        start + first,
        head + first // block * 8,
        body + first // 8 * width,
        first,
        np.minimum(TILE, n - first),
        np.full_like(first, number),
    )
    return np.stack(columns, axis=1)


def _heads(at: int, body: int, end: int, used: int, number: int) -> Any:
    """Parts of a tensor's heads: start, heads; the last byte and the bits used of it, or 8; number, 0."""
    first = np.arange(at, body, 8 * CHUNK, dtype=np.int64)
    table = np.zeros((len(first), COLUMNS), dtype=np.int64)
    table[:, 0] = first
    table[:, 1] = np.minimum(CHUNK, (body - first) // 8)
    table[:, 2] = end - 1
    table[:, 3] = used or 8
    table[:, 4] = number
    return table


def _table(parts: list[Any], device: torch.device) -> Tensor:
    rows = np.concatenate([*parts, np.empty((0, COLUMNS), dtype=np.int64)])
    return torch.from_numpy(rows).to(device)


@triton.jit  # type: ignore[untyped-decorator]
def _row() -> Any:
    """The row of a tile that each row of the layout is."""
    i = tl.arange(0, ROWS)
    return ((i // 32) % 8) * 128 + (i // 256) * 32 + i % 32


@triton.jit  # type: ignore[untyped-decorator]
def _by_block(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows as (reps, reps of a block, warps, warps of a block, lanes, lanes of a block)."""
    lanes: tl.constexpr = min(BLOCK // 4, 32)
    reps: tl.constexpr = min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = max(BLOCK // 512, 1)
    return tl.reshape(x, [4 // reps, reps, 8 // warps, warps, 32 // lanes, lanes])


@triton.jit  # type: ignore[untyped-decorator]
def _by_row(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One value a block as one a row."""
    lanes: tl.constexpr = min(BLOCK // 4, 32)
    reps: tl.constexpr = min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = max(BLOCK // 512, 1)
    shape: tl.constexpr = [4 // reps, reps, 8 // warps, warps, 32 // lanes, lanes]
    return tl.reshape(tl.broadcast_to(x[:, None, :, None, :, None], shape), [ROWS])


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of each block in its tile."""
    lanes: tl.constexpr = 32 // min(BLOCK // 4, 32)
    reps: tl.constexpr = 4 // min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = 8 // max(BLOCK // 512, 1)
    rep = tl.arange(0, reps)[:, None, None]
    warp = tl.arange(0, warps)[None, :, None]
    return (warp * reps + rep) * lanes + tl.arange(0, lanes)[None, None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _load32(at, mask, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Int32 at byte pointers."""
    if WORDS:
        return tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    found = tl.load(at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        found |= tl.load(at + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _store32(at, bits, mask, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same bytes written."""
    if WORDS:
        tl.store(at.to(tl.pointer_type(tl.int32)), bits, mask=mask)
    else:
        for i in tl.static_range(4):
            tl.store(at + i, ((bits >> (8 * i)) & 255).to(tl.uint8), mask=mask)


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
    """Heads and levels of one tile; a flag for its tensor where it is not finite."""
    tile = table_ptr + tl.program_id(0) * 6
    start, head, body = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    first, count, number = tl.load(tile + 3), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5)
    if ALIGNED:
        start = (start >> 2) * 4
    most: tl.constexpr = (1 << WIDTH) - 1.0
    row, column = _row(), tl.arange(0, 4)[None, :]
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
    tl.store(flags_ptr + number + row * 0, row * 0 + 1, mask=worst >= INFINITE)
    low = tl.min(tl.min(tl.min(_by_block(least, BLOCK), axis=1), axis=4), axis=2)  # of a thread first
    high = tl.max(tl.max(tl.max(_by_block(greatest, BLOCK), axis=1), axis=4), axis=2)
    low = tl.minimum(tl.maximum(low, -FARTHEST), FARTHEST) + 0.0
    high = tl.minimum(tl.maximum(high, -FARTHEST), FARTHEST) + 0.0
    unit = tl.div_rn(high - low, low * 0.0 + most)
    block = _blocks(BLOCK)
    here = block * BLOCK < count
    at = wire_ptr + head + block * 8
    _store32(at, unit.to(tl.int32, bitcast=True), here, WORDS)
    _store32(at + 4, low.to(tl.int32, bitcast=True), here, WORDS)
    divisor = tl.where(unit == 0.0, float("inf"), unit)  # a quotient of 0
    y = tl.div_rn(x - _by_row(low, BLOCK)[:, None], _by_row(divisor, BLOCK)[:, None])
    if STOCHASTIC:
        y = tl.minimum(tl.maximum(y, 0.0), most)
        code = _at_random(y, tl.load(keys_ptr + number), first, row, column, count, MASKED)
    else:
        code = tl.minimum(tl.maximum(y + 0.5, 0.0), most).to(tl.int32)
    if MASKED:
        code = tl.where(inside, code, 0)
    packed = tl.sum(code << (column * WIDTH), axis=1)
    each: tl.constexpr = WIDTH // 2  # bytes of a row
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
    """Levels by `dither24`: 16 bits decide, and where they tie, once in 65,536, 8 more do."""
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
    """Flags of a message for some of the heads and the last byte of a tensor, and one flag for any."""
    part = table_ptr + tl.program_id(0) * 6
    start, count, last = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    used, message = tl.load(part + 3).to(tl.int32), tl.load(part + 4) + tl.program_id(1)
    wire = wire_ptr + tl.program_id(1).to(tl.int64) * stride
    i = tl.arange(0, CHUNK)
    mask = i < count
    at = wire + start + i * 8
    unit, low = _load32(at, mask, WORDS), _load32(at + 4, mask, WORDS)
    wrong = (unit < 0) | (unit >= INFINITE) | ((low & MAGNITUDE) >= INFINITE)
    end = low.to(tl.float32, bitcast=True) + unit.to(tl.float32, bitcast=True) * MOST
    endless = (end.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE
    last_byte = tl.load(wire + last + i * 0, mask=i == 0, other=0).to(tl.int32)
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
    """Add one tile of COUNT messages, in order, unless any message is invalid."""
    if tl.load(flags_ptr + any_flag) == 0:
        tile = table_ptr + tl.program_id(0) * 6
        start, head, body = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        count = tl.load(tile + 4).to(tl.int32)
        if ALIGNED:
            start = (start >> 2) * 4
        row, column = _row(), tl.arange(0, 4)[None, :]
        place = row[:, None] * 4 + column
        block = _blocks(BLOCK)
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
            unit = _load32(at, here, WORDS).to(tl.float32, bitcast=True)
            low = _load32(at + 4, here, WORDS).to(tl.float32, bitcast=True)
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
            value = _by_row(low, BLOCK)[:, None] + code.to(tl.float32) * _by_row(unit, BLOCK)[:, None]
            total += value * alpha
        if MASKED:
            tl.store(out_ptr + start + place, total, mask=inside)
        else:
            tl.store(out_ptr + start + place, total)
