"""Tile of the Triton kernels.

A tile has 4,096 elements in 1,024 rows of four. Row rep * 256 + warp * 32 + lane of Triton's layout is row
warp * 128 + rep * 32 + lane of the tile: one warp finds a block's extremes without shared memory.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

ROWS = tl.constexpr(1024)
INFINITE = tl.constexpr(0x7F800000)  # bits of |x| from which x is Inf or NaN
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def row_numbers() -> Any:
    i = tl.arange(0, ROWS)
    return ((i // 32) % 8) * 128 + (i // 256) * 32 + i % 32


@triton.jit  # type: ignore[untyped-decorator]
def by_block(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows as (reps, reps of a block, warps, warps of a block, lanes, lanes of a block)."""
    lanes: tl.constexpr = min(BLOCK // 4, 32)
    reps: tl.constexpr = min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = max(BLOCK // 512, 1)
    return tl.reshape(x, [4 // reps, reps, 8 // warps, warps, 32 // lanes, lanes])


@triton.jit  # type: ignore[untyped-decorator]
def by_row(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes: tl.constexpr = min(BLOCK // 4, 32)
    reps: tl.constexpr = min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = max(BLOCK // 512, 1)
    shape: tl.constexpr = [4 // reps, reps, 8 // warps, warps, 32 // lanes, lanes]
    return tl.reshape(tl.broadcast_to(x[:, None, :, None, :, None], shape), [ROWS])


@triton.jit  # type: ignore[untyped-decorator]
def block_numbers(BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes: tl.constexpr = 32 // min(BLOCK // 4, 32)
    reps: tl.constexpr = 4 // min(max(BLOCK // 128, 1), 4)
    warps: tl.constexpr = 8 // max(BLOCK // 512, 1)
    rep = tl.arange(0, reps)[:, None, None]
    warp = tl.arange(0, warps)[None, :, None]
    return (warp * reps + rep) * lanes + tl.arange(0, lanes)[None, None, :]


@triton.jit  # type: ignore[untyped-decorator]
def load32(at, mask, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load int32 at byte pointers; WORDS: multiples of 4 bytes."""
    if WORDS:
        return tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    found = tl.load(at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        found |= tl.load(at + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def store32(at, bits, mask, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    if WORDS:
        tl.store(at.to(tl.pointer_type(tl.int32)), bits, mask=mask)
    else:
        for i in tl.static_range(4):
            tl.store(at + i, ((bits >> (8 * i)) & 255).to(tl.uint8), mask=mask)
