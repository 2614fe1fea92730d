"""Random bits on a GPU, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.turn import MASK
from laconic.kernels import checks, dispatch
from laconic.kernels.philox.reference import LOWER_KEY

TILE = 4096
LOWER = tl.constexpr(LOWER_KEY - (1 << 64))


@triton.jit
def block(key, counter):  # type: ignore[no-untyped-def]
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(key, low, high, low * 0, low * 0)


@triton.jit
def upper16(key, row, column):  # type: ignore[no-untyped-def]
    """Return the dither's upper 16 bits int32 (r, 4) of rows int64 (r,) of four."""
    w0, w1, w2, w3 = block(key, row >> 1)
    odd = (row & 1) > 0
    first, second = tl.where(odd, w2, w0)[:, None], tl.where(odd, w3, w1)[:, None]
    word = tl.where(column < 2, first, second)
    return ((word >> ((column & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def lower8(key, row, column):  # type: ignore[no-untyped-def]
    w0, w1, w2, w3 = block(key ^ LOWER, row >> 2)
    which = row & 3
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    return ((word[:, None] >> (column * 8).to(tl.uint32)) & 255).to(tl.int32)


@triton.jit
def upper16_joined(key, row):  # type: ignore[no-untyped-def]
    """Return `upper16` for tiles that are not aligned."""
    w0, w1, w2, w3 = block(key, row >> 1)
    odd = (row & 1) > 0
    first, second = tl.where(odd, w2, w0), tl.where(odd, w3, w1)
    low, high = tl.join(first & 0xFFFF, second & 0xFFFF), tl.join(first >> 16, second >> 16)
    return tl.reshape(tl.join(low, high), (1024, 4)).to(tl.int32)


@triton.jit
def lower8_joined(key, row):  # type: ignore[no-untyped-def]
    w0, w1, w2, w3 = block(key ^ LOWER, row >> 2)
    which = row & 3
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    even = tl.join(word & 255, (word >> 16) & 255)
    return tl.reshape(tl.join(even, tl.join((word >> 8) & 255, word >> 24)), (1024, 4)).to(tl.int32)


@triton.jit
def dither_kernel(out_ptr, keys_ptr, table_ptr, tiles):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    start, first = tl.load(table_ptr + tile), tl.load(table_ptr + tiles + tile)
    count = tl.load(table_ptr + 2 * tiles + tile).to(tl.int32)
    key = tl.load(keys_ptr + tl.load(table_ptr + 3 * tiles + tile))
    local = tl.arange(0, 1024)
    column = tl.arange(0, 4)[None, :]
    row = (first >> 2) + local
    value = (upper16_joined(key, row) << 8) | lower8_joined(key, row)
    place = local[:, None] * 4 + column
    # `first` is a multiple of 4
    lead = (tl.load(table_ptr + 4 * tiles + tile)).to(tl.int32)
    tl.store(out_ptr + start + place - lead, value, mask=(place < count) & (place >= lead))


@triton.jit
def uniform_kernel(out_ptr, key, first, lead, n):  # type: ignore[no-untyped-def]
    """Store n elements from counter `first` on, without its first `lead` words."""
    row = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    w0, w1, w2, w3 = block(key, row + first)
    column = tl.arange(0, 4)[None, :]
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (1024, 4))
    value = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    place = row[:, None] * 4 + column - lead
    tl.store(out_ptr + place, value, mask=(place >= 0) & (place < n))


@lru_cache(maxsize=128)
def _table(sizes: tuple[int, ...], offset: int, device: torch.device) -> Tensor:
    """Return rows: place in the output, stream element, elements, tensor, skipped elements."""
    lead = offset % 4
    n = np.array(sizes, np.int64)
    padded = n + lead
    tiles = -(-padded // TILE) * (n > 0)
    tensor = np.repeat(np.arange(len(n), dtype=np.int64), tiles)
    first = (np.arange(len(tensor), dtype=np.int64) - (np.cumsum(tiles) - tiles)[tensor]) * TILE
    start = (np.cumsum(n) - n)[tensor] + first
    start[first > 0] -= lead
    skipped = np.where(first == 0, lead, 0)
    rows = [start, first + offset - lead, np.minimum(padded[tensor] - first, TILE), tensor, skipped]
    return torch.from_numpy(np.stack(rows)).to(device)


def dithers24(keys: Sequence[int], sizes: Sequence[int], device: torch.device, offset: int = 0) -> Tensor:
    out = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    table = _table(tuple(sizes), offset, device)
    drawn = sent_to(checks.keys64([key & MASK for key in keys], len(sizes)), device)
    if (tiles := table.shape[1]) > 0:
        with dispatch.device_of(out):
            dither_kernel[(tiles,)](out, drawn, table, tiles, num_warps=8)
    return out


def uniform(key: int, n: int, device: torch.device, offset: int = 0) -> Tensor:
    out = torch.empty(n, dtype=torch.float32, device=device)
    signed = (key & MASK) - ((key & MASK) >> 63 << 64)
    if n:
        with dispatch.device_of(out):
            uniform_kernel[(triton.cdiv(n + 3, TILE),)](out, signed, offset >> 2, offset & 3, n, num_warps=8)
    return out
