"""Quantisers in plain torch; kernels with the same scales equal it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.quantise.dither import dither
from laconic.kernels.quantise.form import Form, Measure
from laconic.kernels.quantise.norms import norms as norms
from laconic.kernels.quantise.places import GROUP, chunks, key_words, owners, places
from laconic.kernels.quantise.units import Units, all_units, per_block

ONE = 65536.0  # unit of y: native code has 16 fractional bits
TINY, ENLARGE = 2.0**-60, 2.0**100  # blocks below TINY are enlarged: 1 / scale must be a float


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    return NonFiniteError(
        f"a quantiser has no level for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements), or its scale, holds them: skip such a step, as `compress` does"
    )


def quantise(x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure) -> Tensor:
    at = places(segments, form, x.device)
    scales = checked_scales(x, segments, form, measure)
    wire = x.new_empty(at.nbytes + 1, dtype=torch.uint8)  # the last is for codes past a tensor's end
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    heads = torch.arange(at.blocks, dtype=torch.int64, device=x.device) - at.first_block[of]
    heads = (at.head[of] + 4 * heads)[:, None] + torch.arange(4, dtype=torch.int64, device=x.device)
    wire[heads.view(-1)] = scales.view(torch.uint8)
    for units, rows, level in rounded(x, segments, keys, form, measure, scales):
        if form.base3:
            codes = bitpack.pack_ternary(level.view(-1))
        else:
            sign = (rows.view(torch.int32) < 0).to(torch.int32)
            codes = bitpack.pack_bits((level.abs() | sign << (form.bits - 1)).view(-1), form.bits)
        if units.alone:
            begin = 4 * at.blocks + units.begin * at.unit_nbytes
            end = min(begin + codes.numel(), at.nbytes)
            wire[begin:end] = codes[: end - begin]
        else:
            index, inside = units.bytes_of()
            wire[torch.where(inside, index, at.nbytes).view(-1)] = codes
    return wire[: at.nbytes]


def quantise_levels(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> tuple[Tensor, Tensor]:
    scales = checked_scales(x, segments, form, measure)
    signed = x.new_empty(segments.numel + 1, dtype=torch.int32)  # last: levels past a tensor's end
    for units, _, level in rounded(x, segments, keys, form, measure, scales):
        if units.alone:
            begin = units.begin * units.at.unit
            end = min(begin + level.numel(), segments.numel)
            signed[begin:end] = level.view(-1)[: end - begin]
        else:
            index = units.at.first_element[units.of, None] + units.position
            signed[torch.where(units.inside, index, segments.numel).view(-1)] = level.view(-1)
    return scales, signed[: segments.numel]


def checked_scales(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    """Return scales. Raises `NonFiniteError` for non-finite scales or elements."""
    at = places(segments, form, x.device)
    scales = norms(x, segments, form, measure) if measure.scales is None else measure.scales
    flags = torch.zeros(len(segments), dtype=torch.int32, device=x.device)
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    flags.index_add_(0, of, (~torch.isfinite(scales)).to(torch.int32))
    if measure.scales is not None:  # measured ones are not finite where an element is not
        for units in all_units(segments, form, x.device):
            bad = ~torch.isfinite(units.of_x(x, segments))
            flags.index_add_(0, units.of, bad.any(dim=1).to(torch.int32))
    deferred.check(flags, lambda number: not_finite(number, segments))
    return scales


def rounded(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure, scales: Tensor
) -> Iterator[tuple[Units, Tensor, Tensor]]:
    """Yield units, their elements and signed levels (c, unit)."""
    words = key_words(keys, segments, x.device)
    factor, enlarge = factors(scales, form)
    for units in all_units(segments, form, x.device):
        rows, block = units.of_x(x, segments), units.block(form)
        if measure.floors is not None:
            rows = torch.where(rows.abs() < measure.floors[block], 0.0, rows)
        y = ((rows.abs() * enlarge[block]) * factor[block]).clamp_(max=most(form))
        level, threshold = level_and_threshold(y, form)
        groups = units.at.unit // GROUP
        number = units.number[:, None] * groups + torch.arange(groups, dtype=torch.int64, device=x.device)
        key = words[:, :1] if units.alone else words[:, units.of]
        u = dither(number, key[:, :, None]).view(rows.shape)
        level += u < threshold
        yield units, rows, torch.where(rows.view(torch.int32) < 0, -level, level)


def most(form: Form) -> float:
    """Return y of the scale."""
    return ONE if form.powers else ONE * form.levels


def factors(scales: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return two factors (B,): y = |x| * second * first, the second a power of two."""
    top = torch.full_like(scales, most(form))
    small = (scales > 0) & (scales < TINY)
    enlarge = torch.where(small, torch.full_like(scales, ENLARGE), torch.ones_like(scales))
    z = scales * enlarge
    inv = top / z
    inv = torch.where(inv * z < top, torch.nextafter(inv, torch.full_like(inv, torch.inf)), inv)
    return torch.where(scales == 0, 0.0, inv), enlarge


def level_and_threshold(y: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the level below y, and 2^24 times the probability of the next."""
    if form.powers:
        bits = y.view(torch.int32)
        low = y * 2.0 ** (form.levels - 1)  # below ONE in the cell of level 0
        above = bits >= (127 + 16 + 1 - form.levels) << 23
        level = torch.where(above, (bits >> 23) - (127 + 16 - form.levels), 0)
        threshold = torch.where(above, (bits & 0x7FFFFF) << 1, (low.clamp(max=ONE) * 256).to(torch.int32))
        return level, threshold
    level = y.to(torch.int32) >> 16
    return level, ((y - (level << 16)) * 256).to(torch.int32)


def values(signed: Tensor, scales: Tensor, form: Form) -> Tensor:
    if form.powers:
        bits = (127 + signed.abs() - form.levels) << 23
        size = torch.where(signed != 0, bits.view(torch.float32), 0.0)
        return torch.where(signed < 0, -size, size) * scales
    size = signed.to(torch.float32)
    if form.levels > 1:
        size /= torch.full((), form.levels, dtype=torch.float32, device=signed.device)
    return size * scales


def dequantise_add_(wire: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float) -> Tensor:
    at = places(segments, form, wire.device)
    if wire.numel() != at.nbytes:
        raise WireError(f"a message of {at.nbytes} bytes is expected, got {wire.numel()}")
    if not at.units:
        return out
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    heads = torch.arange(at.blocks, dtype=torch.int64, device=wire.device) - at.first_block[of]
    heads = (at.head[of] + 4 * heads)[:, None] + torch.arange(4, dtype=torch.int64, device=wire.device)
    scales = wire[heads].view(torch.float32).view(-1)
    bad = ~torch.isfinite(scales) | (scales.view(torch.int32) < 0)
    flags = torch.zeros(len(segments) + 2, dtype=torch.int32, device=wire.device)
    flags.index_add_(0, of, bad.to(torch.int32))
    flags[-1:] = (wire[at.tails] >= at.tail_limits).any()
    signed = wire.new_empty(at.units * at.unit, dtype=torch.int8 if form.bits <= 8 else torch.int16)
    for units in all_units(segments, form, wire.device):
        level, wrong = unpacked(units, wire, form)
        signed[units.begin * at.unit : units.end * at.unit] = level
        if wrong is not None:
            flags[-2:-1] |= wrong

    def error(number: int) -> WireError:
        if number < len(segments):
            return WireError(f"the scale of a block of tensor {number} is negative or not finite")
        if number > len(segments):
            return WireError("what follows the last code of a tensor must be zero")
        if form.base3:
            return WireError("five levels make a byte of at most 242, got a larger one")
        return WireError(f"there are levels up to {form.levels}, got a larger one")

    deferred.check(flags, error)
    damaged = None if wire.is_cpu else flags.any()
    return add_(signed, at.first_unit * at.unit, scales, segments, out, form, alpha, damaged)


def unpacked(units: Units, wire: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    """Return levels, and whether any is too large (None: impossible)."""
    at = units.at
    if units.alone:
        begin = 4 * at.blocks + units.begin * at.unit_nbytes
        part = wire[begin : begin + (units.end - units.begin) * at.unit_nbytes]
        part = torch.nn.functional.pad(part, (0, (units.end - units.begin) * at.unit_nbytes - part.numel()))
    else:
        index, inside = units.bytes_of()
        part = (wire.take(index * inside) * inside).view(-1)
    n = (units.end - units.begin) * at.unit
    if form.base3:
        whole = part.to(torch.int32)
        digits = torch.stack([whole // 3**i % 3 for i in range(5)], dim=1).view(-1)
        return torch.where(digits == 2, -1, digits), (part >= 243).any()
    codes = bitpack.unpack_bits(part, form.bits, n)
    level = codes & (1 << (form.bits - 1)) - 1
    wrong = None if form.levels & form.levels + 1 == 0 else (level > form.levels).any()
    return torch.where(codes >> (form.bits - 1) != 0, -level, level), wrong


def levels_add_(
    signed: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    """Add in two roundings: never one fused multiply-add."""
    first = places(segments, form, out.device).first_element
    return add_(signed, first, scales, segments, out, form, alpha, None)


def add_(
    signed: Tensor,
    first: Tensor,
    scales: Tensor,
    segments: Segments,
    out: Tensor,
    form: Form,
    alpha: float,
    damaged: Tensor | None,
) -> Tensor:
    """Add alpha * values, unless `damaged`; levels of tensor i begin at `first[i]`."""
    at, device = places(segments, form, out.device), out.device
    joined, alone = segments.joined, len(segments) == 1
    in_order = first is at.first_element
    for begin, end in chunks(segments.numel, 1, device):
        levels = signed[begin:end]
        if alone:
            scale = spread(scales, begin, end, form)
        else:
            of = owners(at.first_element, at.sizes, begin, end)
            block = at.first_block[of]
            if form.block or len(joined) > 1 or not in_order:
                inside = torch.arange(begin, end, dtype=torch.int64, device=device) - at.first_element[of]
                block = block + per_block(inside, form) if form.block else block
                levels = levels if in_order else signed[first[of] + inside]
            scale = scales[block]
        value = values(levels.to(torch.int32), scale, form) * alpha
        if damaged is not None:
            value = torch.where(damaged, -0.0, value)  # adding it changes nothing
        if len(joined) == 1:
            out[joined.starts[0] + begin : joined.starts[0] + end].add_(value)
        else:
            out.index_add_(0, at.starts[of] + inside, value)
    return out


def spread(scales: Tensor, begin: int, end: int, form: Form) -> Tensor:
    if not form.block:
        return scales
    first, last = begin // form.block, -(-end // form.block)
    each = scales[first:last].repeat_interleave(form.block, output_size=(last - first) * form.block)
    return each[begin - first * form.block :][: end - begin]
