"""Signs and mean magnitudes on a GPU: one launch encodes a message, one decodes those of all ranks.

A program reads a tile of 4,096 elements as 512 rows of 8: a byte of signs each. Whole tiles are read without
a mask, in a launch apart from the last tiles of the tensors. Blocks are 64 to 4,096 elements, a power of two,
and so lie in one tile; or they are whole tensors, whose sums of tiles a second kernel adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.sign.reference import BAD_MEAN, BAD_PADDING
from laconic.kernels.upload import uploaded

TILE = 4096
LEAST_BLOCK = 64
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
CHECKED = 64  # tiles that a program validates


@triton.jit
def _column(table, column, tiles, tile):  # type: ignore[no-untyped-def]
    return tl.load(table + column * tiles + tile)


@triton.jit
def _store_word(at, word, mask):  # type: ignore[no-untyped-def]
    """Store int32 words at addresses of bytes."""
    for i in tl.static_range(4):
        tl.store(at + i, ((word >> (8 * i)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _load_word(at, mask):  # type: ignore[no-untyped-def]
    """Load int32 words from addresses of bytes."""
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(at + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def _not_finite(word):  # type: ignore[no-untyped-def]
    return (word & 0x7F800000) == 0x7F800000


@triton.jit
def _coins(key, first):  # type: ignore[no-untyped-def]
    """Coins of 4,096 elements, from one on whose number is a multiple of 128, in bytes as int32 (512,)."""
    counter = (first >> 7) + tl.arange(0, 32)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, low * 0, low * 0)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (128, 1))
    byte = (word >> (8 * tl.arange(0, 4)[None, :]).to(tl.uint32)) & 255
    return tl.reshape(byte, (512,)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(  # type: ignore[no-untyped-def]
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
    """Signs of a tile, and the means of its blocks, or for BLOCK 0 the sum of the tile."""
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
def mean_kernel(wire_ptr, flag_ptr, partial_ptr, table_ptr, tensors):  # type: ignore[no-untyped-def]
    """The mean of a tensor from the sums of its tiles."""
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


@triton.jit  # type: ignore[untyped-decorator]
def validate_kernel(  # type: ignore[no-untyped-def]
    wires_ptr,
    flags_ptr,
    table_ptr,
    tiles,
    messages,
    BLOCK: tl.constexpr,
    MEANS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Flags of a message: a bad mean, and padding that is not zero; then whether any is set."""
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


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(  # type: ignore[no-untyped-def]
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
    """Add alpha times a tile of all messages, in their order, unless a flag is set."""
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


@dataclass(frozen=True)
class Plan:
    """Tables of a message: int64 (7, tiles) of its whole tiles, of the last ones and of all, and of tensors.

    Rows: first element in the buffer, byte of its signs, byte of its first mean, tensor, first element in the
    tensor, elements, place among all tiles. Of tensors: first tile, tiles, elements, byte of the mean.
    """

    full: Tensor
    last: Tensor
    all: Tensor
    tensors: Tensor
    nbytes: int
    aligned: bool


@lru_cache(maxsize=128)
def plan(segments: Segments, block: int, apart: bool, device: torch.device) -> Plan:
    """Return the tables of a message, or of [means of all tensors | signs of all tensors]."""
    sizes, starts = np.array(segments.sizes, np.int64), np.array(segments.starts, np.int64)
    tiles, signs = -(-sizes // TILE), (sizes + 7) // 8
    if apart:
        head = 4 * np.arange(len(sizes), dtype=np.int64)
        bits, nbytes = 4 * len(sizes) + _before(signs), 4 * len(sizes) + int(signs.sum())
    else:
        means = 4 * (-(-sizes // block) if block else np.minimum(sizes, 1))
        head, nbytes = _before(means + signs), int((means + signs).sum())
        bits = head + means
    tensor = np.repeat(np.arange(len(sizes), dtype=np.int64), tiles)
    slot = np.arange(len(tensor), dtype=np.int64)
    first = (slot - _before(tiles)[tensor]) * TILE
    count = np.minimum(sizes[tensor] - first, TILE)
    mean_at = head[tensor] + (4 * (first // block) if block else 0)
    rows = np.stack([starts[tensor] + first, bits[tensor] + first // 8, mean_at, tensor, first, count, slot])
    whole = count == TILE
    present = np.arange(len(sizes)) if apart else np.flatnonzero(sizes)
    tensors = np.stack([_before(tiles), tiles, sizes, head])[:, present]
    full, last, everything, owners = (
        torch.from_numpy(np.ascontiguousarray(each)).to(device)
        for each in (rows[:, whole], rows[:, ~whole], rows, tensors)
    )
    return Plan(full, last, everything, owners, nbytes, bool((starts % 4 == 0).all()))


def _before(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum(counts) - counts


def serves(block: int) -> bool:
    """Whether the kernels divide tensors in blocks of so many elements; 0: whole tensors."""
    return block == 0 or (LEAST_BLOCK <= block <= TILE and block & (block - 1) == 0)


def encode(
    x: Tensor,
    segments: Segments,
    block: int,
    keys: Sequence[int] | None,
    *,
    apart: bool = False,
    opposite: int = 0,
) -> tuple[Tensor, Tensor]:
    """The message, or with `apart` [means | signs]; and whether a mean is not finite, int32 (1,).

    `opposite`: 255 to toss the opposite coins.
    """
    tables = plan(segments, block, apart, x.device)
    wire = torch.empty(tables.nbytes, dtype=torch.uint8, device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    slots = tables.all.shape[1] if block == 0 else 1
    partial = torch.empty(slots, dtype=torch.float64, device=x.device)
    drawn = flag if keys is None else uploaded(checks.keys64(keys, len(segments)), x.device)
    with dispatch.device_of(x):
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                encode_kernel[(count,)](
                    x, wire, flag, partial, drawn, table, count, opposite, BLOCK=block, TOSS=keys is not None,
                    ALIGNED=tables.aligned, MASKED=masked, **OPTIONS,
                )  # fmt: skip
        if block == 0 and (count := tables.tensors.shape[1]) > 0:
            mean_kernel[(count,)](
                wire, flag, partial, tables.tensors, count, num_warps=4, enable_fp_fusion=False
            )
    return wire, flag


def add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float, block: int, *, apart: bool = False
) -> Tensor:
    """Add alpha times these messages to the segments, in their order, once all are valid.

    With `apart` they are [values | signs], and any value is valid.
    """
    if not segments.numel:
        return out
    tables, n = plan(segments, block, apart, out.device), len(wires)
    flags = torch.zeros(2 * n + 1, dtype=torch.int32, device=out.device)
    pointers = uploaded(torch.tensor([wire.data_ptr() for wire in wires], dtype=torch.int64), out.device)
    tiles = tables.all.shape[1]
    with dispatch.device_of(out):
        validate_kernel[(triton.cdiv(tiles, CHECKED), n)](
            pointers, flags, tables.all, tiles, n, BLOCK=block, MEANS=not apart, TILES=CHECKED, num_warps=4
        )
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                add_kernel[(count,)](
                    out, pointers, flags, table, count, n, float(alpha), BLOCK=block, ALIGNED=tables.aligned,
                    MASKED=masked, **OPTIONS,
                )  # fmt: skip
    check(flags[: 2 * n], _invalid)
    return out


def _invalid(i: int) -> WireError:
    error = WireError((BAD_MEAN, BAD_PADDING)[i % 2])
    error.message = i // 2
    return error
