"""Natural compression on a GPU.

Only tiles where the dither's upper 16 bits do not decide draw the lower 8.
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
from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.core.turn import MASK
from laconic.kernels import checks, dispatch
from laconic.kernels.natural.reference import BAD_EXPONENT
from laconic.kernels.philox.gpu import lower8, lower8_joined, upper16, upper16_joined
from laconic.kernels.sign.reference import BAD_PADDING

TILE = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    wire_ptr,
    flag_ptr,
    keys_ptr,
    table_ptr,
    tiles,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    tile = tl.program_id(0)
    start = tl.load(table_ptr + tile)
    bytes_at = tl.load(table_ptr + tiles + tile)
    signs_at = tl.load(table_ptr + 2 * tiles + tile)
    key = tl.load(keys_ptr + tl.load(table_ptr + 3 * tiles + tile))
    first = tl.load(table_ptr + 4 * tiles + tile)
    if ALIGNED:
        start = (start >> 2) * 4
    local = tl.arange(0, 1024)
    column = tl.arange(0, 4)[None, :]
    place = local[:, None] * 4 + column
    count = tl.load(table_ptr + 5 * tiles + tile).to(tl.int32) if MASKED else 4096
    if MASKED:
        x = tl.load(x_ptr + start + place, mask=place < count, other=0.0)
    else:
        x = tl.load(x_ptr + start + place)
    pattern = x.to(tl.int32, bitcast=True)
    exponent = (pattern >> 23) & 255
    threshold = (pattern & 0x7FFFFF) << 1
    row = (first >> 2) + local
    upper = upper16(key, row, column) if ALIGNED else upper16_joined(key, row)
    up = upper < (threshold >> 8)
    tie = upper == (threshold >> 8)
    if tl.max(tl.max((tie & ((threshold & 255) > 0)).to(tl.int32), axis=1), axis=0) > 0:
        lower = lower8(key, row, column) if ALIGNED else lower8_joined(key, row)
        up = up | (tie & (lower < (threshold & 255)))
    if tl.max(tl.max(exponent, axis=1), axis=0) > 254:
        tl.store(flag_ptr, 1)
    exponent = tl.minimum(exponent + up.to(tl.int32), 254)
    negative = (pattern >> 31) & 1
    if BITS == 8:
        exponent = tl.minimum(tl.maximum(exponent - 18, 0), 127) | (negative << 7)
    at = wire_ptr + bytes_at + place
    if MASKED:
        tl.store(at, exponent.to(tl.uint8), mask=place < count)
    else:
        tl.store(at, exponent.to(tl.uint8))
    if BITS == 9:
        nibble = tl.reshape(tl.sum(negative << column, axis=1), (512, 2))
        byte = tl.sum(nibble << (4 * tl.arange(0, 2)[None, :]), axis=1)
        octet = tl.arange(0, 512)
        if MASKED:
            tl.store(wire_ptr + signs_at + octet, byte.to(tl.uint8), mask=octet * 8 < count)
        else:
            tl.store(wire_ptr + signs_at + octet, byte.to(tl.uint8))


@triton.jit
def validate_kernel(wires_ptr, flags_ptr, table_ptr, tiles, messages):  # type: ignore[no-untyped-def]
    """Set flags for an exponent of 255 and nonzero padding."""
    tile, message = tl.program_id(0), tl.program_id(1)
    wire = tl.load(wires_ptr + message).to(tl.pointer_type(tl.uint8))
    bytes_at = tl.load(table_ptr + tiles + tile)
    signs_at = tl.load(table_ptr + 2 * tiles + tile)
    count = tl.load(table_ptr + 5 * tiles + tile).to(tl.int32)
    place = tl.arange(0, 4096)
    exponent = tl.load(wire + bytes_at + place, mask=place < count, other=0).to(tl.int32)
    if tl.max(exponent, axis=0) > 254:
        tl.store(flags_ptr + 2 * message, 1)
        tl.store(flags_ptr + 2 * messages, 1)
    if (count & 7) > 0:
        last = tl.load(wire + signs_at + (count >> 3)).to(tl.int32)
        if (last >> (count & 7)) > 0:
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
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    if tl.load(flags_ptr + 2 * messages) == 0:
        tile = tl.program_id(0)
        start = tl.load(table_ptr + tile)
        bytes_at = tl.load(table_ptr + tiles + tile)
        signs_at = tl.load(table_ptr + 2 * tiles + tile)
        if ALIGNED:
            start = (start >> 2) * 4
        local = tl.arange(0, 1024)
        column = tl.arange(0, 4)[None, :]
        place = local[:, None] * 4 + column
        count = tl.load(table_ptr + 5 * tiles + tile).to(tl.int32) if MASKED else 4096
        if MASKED:
            total = tl.load(out_ptr + start + place, mask=place < count, other=0.0)
        else:
            total = tl.load(out_ptr + start + place)
        for message in range(messages):
            wire = tl.load(wires_ptr + message).to(tl.pointer_type(tl.uint8))
            if MASKED:
                code = tl.load(wire + bytes_at + place, mask=place < count, other=0).to(tl.int32)
            else:
                code = tl.load(wire + bytes_at + place).to(tl.int32)
            if BITS == 8:
                size = tl.where((code & 127) > 0, (code & 127) + 18, 0)
                pattern = (size << 23) | ((code >> 7) << 31)
            else:
                at = wire + signs_at + (local >> 1)
                if MASKED:
                    byte = tl.load(at, mask=local * 4 < count, other=0).to(tl.int32)
                else:
                    byte = tl.load(at).to(tl.int32)
                sign = byte[:, None] >> ((local & 1)[:, None] * 4 + column)
                pattern = (code << 23) | (sign << 31)
            total += pattern.to(tl.float32, bitcast=True) * alpha
        if MASKED:
            tl.store(out_ptr + start + place, total, mask=place < count)
        else:
            tl.store(out_ptr + start + place, total)


@dataclass(frozen=True)
class Plan:
    """Tables int64 (6, tiles) of a message.

    Rows: element in the buffer, bytes of exponent and sign, tensor, element in it, elements.
    """

    full: Tensor
    last: Tensor
    all: Tensor
    nbytes: int
    aligned: bool


@lru_cache(maxsize=128)
def plan(segments: Segments, bits: int, device: torch.device) -> Plan:
    sizes, starts = np.array(segments.sizes, np.int64), np.array(segments.starts, np.int64)
    tiles, signs = -(-sizes // TILE), (sizes + 7) // 8 * (bits == 9)
    at = np.cumsum(signs + sizes) - signs - sizes
    tensor = np.repeat(np.arange(len(sizes), dtype=np.int64), tiles)
    first = (np.arange(len(tensor), dtype=np.int64) - (np.cumsum(tiles) - tiles)[tensor]) * TILE
    count = np.minimum(sizes[tensor] - first, TILE)
    signs_at = at[tensor] + first // 8
    rows = np.stack([starts[tensor] + first, (at + signs)[tensor] + first, signs_at, tensor, first, count])
    whole = count == TILE
    full, last = (
        torch.from_numpy(np.ascontiguousarray(rows[:, each])).to(device) for each in (whole, ~whole)
    )
    nbytes = int((signs + sizes).sum())
    everything = torch.from_numpy(rows).to(device)
    return Plan(full, last, everything, nbytes, bool((starts % 4 == 0).all()))


def encode(x: Tensor, segments: Segments, keys: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    tables = plan(segments, bits, x.device)
    wire = torch.empty(tables.nbytes, dtype=torch.uint8, device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    drawn = sent_to(checks.keys64([key & MASK for key in keys], len(segments)), x.device)
    with dispatch.device_of(x):
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                encode_kernel[(count,)](
                    x,
                    wire,
                    flag,
                    drawn,
                    table,
                    count,
                    BITS=bits,
                    ALIGNED=tables.aligned,
                    MASKED=masked,
                    **OPTIONS,
                )
    return wire, flag


def add_(wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float, bits: int) -> Tensor:
    if not segments.numel:
        return out
    tables, n = plan(segments, bits, out.device), len(wires)
    flags = torch.zeros(2 * n + 1, dtype=torch.int32, device=out.device)
    pointers = sent_to(
        torch.tensor([wire.data_ptr() for wire in wires], dtype=torch.int64, device="cpu"), out.device
    )
    with dispatch.device_of(out):
        if bits == 9:  # with 8 every byte is a code
            tiles = tables.all.shape[1]
            validate_kernel[(tiles, n)](pointers, flags, tables.all, tiles, n, num_warps=4)
        for table, masked in ((tables.full, False), (tables.last, True)):
            if (count := table.shape[1]) > 0:
                add_kernel[(count,)](
                    out, pointers, flags, table, count, n, float(alpha), BITS=bits, ALIGNED=tables.aligned,
                    MASKED=masked, **OPTIONS,
                )  # fmt: skip
    if bits == 9:
        check(flags[: 2 * n], _invalid)
    return out


def _invalid(i: int) -> WireError:
    error = WireError((BAD_EXPONENT, BAD_PADDING)[i % 2])
    error.message = i // 2
    return error
