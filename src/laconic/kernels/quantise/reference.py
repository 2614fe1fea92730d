"""Quantisers in plain torch, all tensors at once: other kernels equal it, bit for bit given the scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.quantise.dither import dither
from laconic.kernels.quantise.form import Form, Measure
from laconic.kernels.quantise.norms import norms as norms
from laconic.kernels.quantise.places import GROUP, Places, chunks, key_words, owners, places

ONE = 65536.0  # native code works with fixed-point numbers of 16 bits behind the point; y is in their unit
TINY, ENLARGE = 2.0**-60, 2.0**100  # below, a block is enlarged, for 1 / scale to be a float


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    """What is raised for tensor `number` of a message."""
    return NonFiniteError(
        f"a quantiser has no level for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements), or its scale, holds them: skip such a step, as `compress` does"
    )


def quantise(x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other."""
    at = places(segments, form, x.device)
    scales = checked_scales(x, segments, form, measure)
    wire = x.new_empty(
        at.nbytes + 1, dtype=torch.uint8
    )  # the last byte takes what lies beyond a tensor's codes
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
    """Scales float32 (B,) and signed levels int32 (K,)."""
    scales = checked_scales(x, segments, form, measure)
    signed = x.new_empty(segments.numel + 1, dtype=torch.int32)  # the last takes what lies beyond a tensor
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
    """The scale of each block, measured or given; `NonFiniteError` where it or an element is not finite."""
    at = places(segments, form, x.device)
    scales = norms(x, segments, form, measure) if measure.scales is None else measure.scales
    flags = torch.zeros(len(segments), dtype=torch.int32, device=x.device)
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    flags.index_add_(0, of, (~torch.isfinite(scales)).to(torch.int32))
    if measure.scales is not None:  # measured ones show what the elements are
        for units in all_units(segments, form, x.device):
            bad = ~torch.isfinite(units.of_x(x, segments))
            flags.index_add_(0, units.of, bad.any(dim=1).to(torch.int32))
    deferred.check(flags, lambda number: not_finite(number, segments))
    return scales


@dataclass(frozen=True)
class Units:
    """Units [begin, end) of all tensors: `of` int64 (c,), the tensor of each; `number`, the unit's in it."""

    at: Places
    begin: int
    end: int
    of: Tensor
    number: Tensor
    alone: bool  # there is one tensor

    @property
    def position(self) -> Tensor:
        """Of each element in its tensor: int64 (c, unit)."""
        columns = torch.arange(self.at.unit, dtype=torch.int64, device=self.of.device)
        return (self.number * self.at.unit)[:, None] + columns

    @property
    def inside(self) -> Tensor:
        """Whether an element is one of the tensor: bool (c, unit)."""
        return self.position < self.at.sizes[self.of, None]

    def of_x(self, x: Tensor, segments: Segments) -> Tensor:
        """The elements float32 (c, unit), zeros beyond a tensor."""
        if self.alone:
            n, begin = segments.sizes[0], self.begin * self.at.unit
            part = x[segments.starts[0] + begin : segments.starts[0] + min(n, self.end * self.at.unit)]
            missing = (self.end - self.begin) * self.at.unit - part.numel()
            return torch.nn.functional.pad(part, (0, missing)).view(-1, self.at.unit)
        position = self.position
        inside = position < self.at.sizes[self.of, None]
        index = (position + self.at.starts[self.of, None]) * inside
        return torch.where(inside, x.take(index), torch.zeros((), dtype=x.dtype, device=x.device))

    def block(self, form: Form) -> Tensor:
        """The block of each unit int64 (c, 1), or of each of its elements (c, unit)."""
        first = self.at.first_block[self.of, None]
        if not form.block:
            return first
        if form.block % self.at.unit == 0:
            return first + per_block(self.number * self.at.unit, form)[:, None]
        return (first + per_block(self.position, form)).clamp(max=self.at.blocks - 1)

    def bytes_of(self) -> tuple[Tensor, Tensor]:
        """Places of its codes' bytes in the wire, int64 (c, b), and whether there is such a byte."""
        columns = torch.arange(self.at.unit_nbytes, dtype=torch.int64, device=self.of.device)
        index = (self.at.body[self.of] + self.number * self.at.unit_nbytes)[:, None] + columns
        return index, index < self.at.body_end[self.of, None]


def all_units(segments: Segments, form: Form, device: torch.device) -> Iterator[Units]:
    """All units of the tensors, some at a time."""
    at = places(segments, form, device)
    for begin, end in chunks(at.units, at.unit, device):
        of = owners(at.first_unit, at.unit_counts, begin, end)
        number = torch.arange(begin, end, dtype=torch.int64, device=device) - at.first_unit[of]
        yield Units(at, begin, end, of, number, len(segments) == 1)


def rounded(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure, scales: Tensor
) -> Iterator[tuple[Units, Tensor, Tensor]]:
    """Units, their elements float32 (c, unit), and signed levels int32 (c, unit)."""
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
    """y of the scale itself."""
    return ONE if form.powers else ONE * form.levels


def factors(scales: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """float32 (B,) twice: y = |x| * second * first, with the second a power of two."""
    top = torch.full_like(scales, most(form))
    small = (scales > 0) & (scales < TINY)
    enlarge = torch.where(small, torch.full_like(scales, ENLARGE), torch.ones_like(scales))
    z = scales * enlarge
    inv = top / z
    inv = torch.where(inv * z < top, torch.nextafter(inv, torch.full_like(inv, torch.inf)), inv)
    return torch.where(scales == 0, 0.0, inv), enlarge  # a level of nothing is 0


def level_and_threshold(y: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The level below y, and 2^24 times the probability of the one above it: int32."""
    if form.powers:
        bits = y.view(torch.int32)
        low = y * 2.0 ** (form.levels - 1)  # in the cell of 0, where it is less than ONE
        above = bits >= (127 + 16 + 1 - form.levels) << 23
        level = torch.where(above, (bits >> 23) - (127 + 16 - form.levels), 0)
        threshold = torch.where(above, (bits & 0x7FFFFF) << 1, (low.clamp(max=ONE) * 256).to(torch.int32))
        return level, threshold
    level = y.to(torch.int32) >> 16
    return level, ((y - (level << 16)) * 256).to(torch.int32)


def values(signed: Tensor, scales: Tensor, form: Form) -> Tensor:
    """Float32 (n,) of signed levels, with the scale of each."""
    if form.powers:
        bits = (127 + signed.abs() - form.levels) << 23
        size = torch.where(signed != 0, bits.view(torch.float32), 0.0)
        return torch.where(signed < 0, -size, size) * scales
    size = signed.to(torch.float32)
    if form.levels > 1:
        size /= torch.full((), form.levels, dtype=torch.float32, device=signed.device)
    return size * scales


def dequantise_add_(wire: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float) -> Tensor:
    """out += alpha * values, once the whole wire has been found valid."""
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
    """Signed levels (c * unit,) of these units, and whether one of them is too large, where that can be."""
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
    """out += alpha * values, in two roundings: never one fused multiply-add."""
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
    """out += alpha * values of the levels of tensor i from `first[i]` on; nothing if `damaged`, bool ()."""
    at, device = places(segments, form, out.device), out.device
    joined, alone = segments.joined, len(segments) == 1
    in_order = first is at.first_element  # each tensor's levels follow those of the one before
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
            value = torch.where(damaged, -0.0, value)  # adding -0.0 changes nothing
        if len(joined) == 1:
            out[joined.starts[0] + begin : joined.starts[0] + end].add_(value)
        else:
            out.index_add_(0, at.starts[of] + inside, value)
    return out


def spread(scales: Tensor, begin: int, end: int, form: Form) -> Tensor:
    """The scales of elements [begin, end) of the only tensor."""
    if not form.block:
        return scales
    first, last = begin // form.block, -(-end // form.block)
    each = scales[first:last].repeat_interleave(form.block, output_size=(last - first) * form.block)
    return each[begin - first * form.block :][: end - begin]


def per_block(position: Tensor, form: Form) -> Tensor:
    """position // block, of positions int64 that are not negative."""
    if form.block & form.block - 1:
        return torch.div(position, form.block, rounding_mode="floor")
    return position >> (form.block.bit_length() - 1)
