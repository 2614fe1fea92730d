"""Quantisers in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.quantise import reference
from laconic.kernels.quantise.base3_kernels import FIVES, check_base3_kernel, pack_base3_kernel
from laconic.kernels.quantise.decode_kernels import check_levels_kernel, dequantise_kernel, get_scales_kernel
from laconic.kernels.quantise.encode_kernels import (
    MEASURED,
    ONE_A_ROW,
    ONE_A_TENSOR,
    put_scales_kernel,
    quantise_kernel,
)
from laconic.kernels.quantise.form import Form, Measure
from laconic.kernels.quantise.norm_kernels import MOMENTS, WHAT, blocks_kernel, tensors_kernel
from laconic.kernels.quantise.norms import blocks_of, finished
from laconic.kernels.quantise.packed_sums import add_levels_
from laconic.kernels.quantise.places import device_keys
from laconic.kernels.quantise.plan import aligned, block_heads, fives, one_buffer, parts_of, plan
from laconic.kernels.quantise.tile import TILE, spanned

BLOCKS = tuple(1 << i for i in range(5, 13))  # sizes measured while a tile is quantised


def norms(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    device = x.device
    if not (form.block == 0 or form.block in BLOCKS) or (measure.clip and form.block) or 0 in segments.sizes:
        return reference.norms(x, segments, form, measure)
    for_all = plan(segments, form, device)
    at, wide = for_all.at, aligned(for_all, x)
    if not at.units:
        return x.new_empty(0)
    what, columns = (MOMENTS.value, 2) if measure.clip else WHAT[measure.norm]
    size = form.block or TILE
    parts = parts_of(segments, size, device)
    sums = torch.empty(parts.blocks * columns, dtype=torch.float64, device=device)
    largest = torch.empty(parts.blocks if columns != 1 else 0, dtype=torch.int32, device=device)
    with dispatch.device_of(x):
        for count, masked, segment, first in for_all.tiles:
            launch(
                blocks_kernel, (count,), x, sums, largest, segment, first, at.starts, at.sizes,
                parts.first_block, size, what, masked, wide,
            )  # fmt: skip
        if not form.block:
            part_sums, sums = sums, torch.empty(len(segments), dtype=torch.float64, device=device)
            scales = torch.empty(len(segments), dtype=torch.float32, device=device)
            launch(
                tensors_kernel, (len(segments),), part_sums, largest, sums, scales, parts.first_block,
                parts.block_counts, x, at.starts, at.sizes, float(measure.clip), what, 1024,
            )  # fmt: skip
    if measure.norm == "max":
        return largest.view(torch.float32) if form.block else scales
    if measure.norm == "l2":
        return finished(sums.sqrt())
    return finished(sums / blocks_of(x, segments, form).sizes)


def quantise(x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure) -> Tensor:
    if not serves(form, measure):
        return reference.quantise(x, segments, keys, form, measure)
    at = plan(segments, form, x.device).at
    wire = torch.empty(at.nbytes, dtype=torch.uint8, device=x.device)
    scales: Tensor | None
    if form.base3:
        scales, levels = quantise_levels(x, segments, keys, form, measure)
        with dispatch.device_of(x):
            for count, segment, first in fives(segments, x.device):
                launch(
                    pack_base3_kernel, (count,), levels, wire, segment, first, at.sizes, at.body,
                    at.first_element, FIVES,
                )  # fmt: skip
    else:
        scales = None if measured(form, measure) else given(x, segments, form, measure)
        encode(x, segments, keys, form, wire, None, scales, scales is None)
    if scales is not None and at.blocks:
        heads = block_heads(segments, form, x.device)
        with dispatch.device_of(x):
            grid = (-(-at.blocks // 512),)
            launch(put_scales_kernel, grid, wire, scales, heads, at.blocks, 512, num_warps=4)
    return wire


def quantise_levels(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> tuple[Tensor, Tensor]:
    if not serves(form, measure):
        return reference.quantise_levels(x, segments, keys, form, measure)
    levels = torch.empty(segments.numel, dtype=torch.int32, device=x.device)
    inside = measured(form, measure)
    if inside:
        blocks = plan(segments, form, x.device).at.blocks
        scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    else:
        scales = given(x, segments, form, measure)
    encode(x, segments, keys, form, None, levels, scales, inside)
    return scales, levels


def encode(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form,
    wire: Tensor | None, levels: Tensor | None, scales: Tensor | None, inside: bool,
) -> None:  # fmt: skip
    """Write codes or levels, and scales if measured `inside` the kernel."""
    for_all = plan(segments, form, x.device)
    at, wide = for_all.at, aligned(for_all, x)
    flags = torch.zeros(len(segments), dtype=torch.int32, device=x.device)
    on_device = device_keys(keys, segments, x.device)
    with dispatch.device_of(x):
        for count, masked, segment, first in for_all.tiles:
            launch(
                quantise_kernel, (count,), x, x if wire is None else wire, x if levels is None else levels,
                x if scales is None else scales, flags, on_device, segment, first, at.starts,
                at.sizes, at.head, at.body, at.body_end, at.first_block, at.first_element, form.block,
                form.levels, form.bits, for_all.columns, form.powers, form.block,
                MEASURED.value if inside else source(form), wire is None, masked, wide,
                num_warps=16 if masked or not wide else 8,  # for kernels of many registers
            )  # fmt: skip
    deferred.check(flags, partial(_not_finite, segments))


def _not_finite(segments: Segments, number: int) -> Exception:
    return reference.not_finite(number, segments)


def dequantise_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    for_all = plan(segments, form, out.device)
    at, wide = for_all.at, aligned(for_all, out)
    for number, wire in enumerate(wires):
        if wire.numel() != at.nbytes:
            error = WireError(f"a message of {at.nbytes} bytes is expected, got {wire.numel()}")
            error.message = number
            raise error
    if not at.units:
        return out
    stacked, stride = one_buffer(wires)
    count = len(wires)
    flags = torch.zeros(3 * count + 1, dtype=torch.int32, device=out.device)
    scales = torch.empty(count * at.blocks, dtype=torch.float32, device=out.device)
    heads, tails = block_heads(segments, form, out.device), at.tails.numel()
    with dispatch.device_of(out):
        launch(
            get_scales_kernel, (-(-max(at.blocks, tails) // 512), count), stacked, stride, scales, heads,
            at.blocks, at.tails, at.tail_limits, tails, flags, 512, num_warps=4,
        )  # fmt: skip
        if form.base3:
            for tiles_, segment, first in fives(segments, out.device):
                launch(
                    check_base3_kernel, (tiles_, count), stacked, stride, flags, segment, first, at.body,
                    at.body_end, FIVES,
                )  # fmt: skip
        elif form.levels & form.levels + 1:
            for tiles_, _, segment, first in for_all.tiles:
                launch(
                    check_levels_kernel, (tiles_, count), stacked, stride, flags, segment, first, at.sizes,
                    at.body, at.body_end, form.levels, form.bits, spanned(form.bits),
                )  # fmt: skip
        for tiles_, masked, segment, first in for_all.tiles:
            launch(
                dequantise_kernel, (tiles_,), stacked, stride, count, scales, at.blocks, flags, out,
                segment, first, at.starts, at.sizes, at.body, at.body_end, at.first_block, float(alpha),
                form.levels, form.bits, form.powers, *for_all.inverse, form.block, form.base3, masked,
                wide,
            )  # fmt: skip
    deferred.check(flags, partial(damaged, form))
    return out


def dequantises(form: Form) -> bool:
    return form.block % 8 == 0


def damaged(form: Form, number: int) -> WireError:
    """Return the error of flag `number`, three per message."""
    message, kind = divmod(number, 3)
    error = WireError(
        (
            "the scale of a block is negative or not finite",
            "five levels make a byte of at most 242, got a larger one"
            if form.base3
            else f"there are levels up to {form.levels}, got a larger one",
            "what follows the last code of a tensor must be zero",
        )[kind]
    )
    error.message = message
    return error


def levels_add_(
    signed: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    if form.block % 8:
        return reference.levels_add_(signed, scales, segments, out, form, alpha)
    return add_levels_(signed, 0, 0, scales, None, segments, out, form, alpha)


def measured(form: Form, measure: Measure) -> bool:
    return measure.scales is None and measure.norm == "max" and not measure.clip and form.block in BLOCKS


def serves(form: Form, measure: Measure) -> bool:
    """Return whether kernels serve it: no floors, and one scale per row of eight."""
    return measure.floors is None and form.block % 8 == 0


def given(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    return norms(x, segments, form, measure) if measure.scales is None else measure.scales


def source(form: Form) -> Any:
    return ONE_A_ROW.value if form.block else ONE_A_TENSOR.value
