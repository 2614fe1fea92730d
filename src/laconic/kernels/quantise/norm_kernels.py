"""Triton kernels of norms."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.quantise.tile import ROWS, load_tile, remaining

LARGEST, SQUARES, SIZES, MOMENTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WHAT = {"max": (0, 0), "l2": (1, 1), "mean": (2, 1)}  # and float64 numbers per part


@triton.jit
def blocks_kernel(
    x_ptr, sums_ptr, largest_ptr, segment_ptr, first_ptr, starts_ptr, sizes_ptr, first_out_ptr,
    BLOCK: tl.constexpr, WHAT: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the bits of the largest |x|, or a float64 sum of x^2 or |x|, per run of BLOCK elements.

    Moments are the largest, and the sums of x - x[0] and of its square (2,), x[0] the tensor's first.
    """
    tile = tl.program_id(0)
    segment, first = tl.load(segment_ptr + tile), tl.load(first_ptr + tile)
    left = remaining(tl.load(sizes_ptr + segment), first)
    COUNT: tl.constexpr = (ROWS * 8) // BLOCK
    number = tl.arange(0, COUNT)
    at = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = tl.load(starts_ptr + segment)
    x = load_tile(x_ptr, start + first, at, left, MASKED, ALIGNED)
    to = tl.load(first_out_ptr + segment) + first // BLOCK + number
    inside = number * BLOCK < left
    if (WHAT == LARGEST) | (WHAT == MOMENTS):
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.store(largest_ptr + to, largest, mask=inside)
    if WHAT == SQUARES:
        wide = x.to(tl.float64)
        tl.store(sums_ptr + to, tl.sum(wide * wide, axis=1), mask=inside)
    if WHAT == SIZES:
        tl.store(sums_ptr + to, tl.sum(tl.abs(x).to(tl.float64), axis=1), mask=inside)
    if WHAT == MOMENTS:
        shifted = x.to(tl.float64) - tl.load(x_ptr + start).to(tl.float64)
        if MASKED:
            shifted = tl.where(at < left, shifted, 0.0)
        tl.store(sums_ptr + 2 * to, tl.sum(shifted, axis=1), mask=inside)
        tl.store(sums_ptr + 2 * to + 1, tl.sum(shifted * shifted, axis=1), mask=inside)


@triton.jit
def tensors_kernel(
    parts_ptr, largest_parts_ptr, sums_ptr, scales_ptr, first_part_ptr, counts_ptr,
    x_ptr, starts_ptr, sizes_ptr, clip, WHAT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Reduce a tensor's parts; for moments, as `norms.limited_by`."""
    segment = tl.program_id(0)
    count, first = tl.load(counts_ptr + segment), tl.load(first_part_ptr + segment)
    number = tl.arange(0, SIZE)
    most = tl.zeros([SIZE], tl.int32)
    sums, squares = tl.zeros([SIZE], tl.float64), tl.zeros([SIZE], tl.float64)
    for i in range(0, count, SIZE):
        inside = i + number < count
        at = first + i + number
        if (WHAT == LARGEST) | (WHAT == MOMENTS):
            most = tl.maximum(most, tl.load(largest_parts_ptr + at, mask=inside, other=0))
        if (WHAT == SQUARES) | (WHAT == SIZES):
            sums += tl.load(parts_ptr + at, mask=inside, other=0.0)
        if WHAT == MOMENTS:
            sums += tl.load(parts_ptr + 2 * at, mask=inside, other=0.0)
            squares += tl.load(parts_ptr + 2 * at + 1, mask=inside, other=0.0)
    largest = tl.max(most, axis=0).to(tl.float32, bitcast=True)
    total = tl.sum(sums, axis=0)
    if (WHAT == SQUARES) | (WHAT == SIZES):
        tl.store(sums_ptr + segment, total)
    elif WHAT == LARGEST:
        tl.store(scales_ptr + segment, largest)
    else:
        size = tl.load(sizes_ptr + segment).to(tl.float64)
        shift = tl.load(x_ptr + tl.load(starts_ptr + segment)).to(tl.float64)
        variance = tl.maximum((tl.sum(squares, axis=0) - total * total / size) / size, 0.0)
        mean = shift + total / size
        deviation = tl.minimum(tl.sqrt(variance), 3.4028234663852886e38).to(tl.float32)
        root = tl.minimum(tl.sqrt(variance + mean * mean), 3.4028234663852886e38).to(tl.float32)
        limit = tl.maximum(clip * deviation, root)
        tl.store(scales_ptr + segment, tl.where((limit > 0) & (limit < largest), limit, largest))
