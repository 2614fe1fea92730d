"""Quantisers in plain torch: what the native kernels must equal, bit for bit given the scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import pack_bits, pack_ternary, unpack_bits, unpack_ternary
from laconic.kernels.philox import dither24
from laconic.kernels.quantise.form import Form, Measure

ONE = 65536.0  # native code works with fixed-point numbers of 16 bits behind the point; y is in their unit
TINY, ENLARGE = 2.0**-60, 2.0**100  # below, a block is enlarged, for 1 / scale to be a float
LARGEST = torch.finfo(torch.float32).max


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    """What is raised for tensor `number` of a message."""
    return NonFiniteError(
        f"a quantiser has no level for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements), or its scale, holds them: skip such a step, as `compress` does"
    )


def norms(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    """Float32 (B,): one a block."""
    return torch.cat([x[:0], *(scales_of(view, form, measure) for view in segments.views(x))])


def scales_of(x: Tensor, form: Form, measure: Measure) -> Tensor:
    """The norm of each block of one tensor; not finite where an element is not."""
    n, size = x.numel(), form.block or max(x.numel(), 1)
    blocks = pad(x, (0, -n % size)).view(-1, size)
    if measure.norm == "max":
        bits = blocks.view(torch.int32) & 0x7FFFFFFF
        largest = bits.amax(dim=1).view(torch.float32) if n else x[:0]
        if not measure.clip:
            return largest
        parts = [clipped_at(block, measure.clip) for block in torch.split(x, size)] if n else []
        limit = torch.stack([largest.new_zeros(()), *parts])[1:]
        return torch.where((limit > 0) & (limit < largest), limit, largest)
    wide = blocks.double()
    if measure.norm == "l2":
        value = wide.square().sum(dim=1).sqrt()
    else:
        counts = (n - torch.arange(0, n, size, device=x.device)).clamp(max=size)
        value = wide.abs().sum(dim=1) / counts
    return torch.where(torch.isfinite(value), value.clamp(max=LARGEST), torch.nan).to(torch.float32)


def clipped_at(x: Tensor, clip: float) -> Tensor:
    """`clip` population standard deviations of n > 0 elements, but no less than the root mean square."""
    first = x[0].double()
    shifted = x.double() - first  # all 0 where all are equal
    variance = ((shifted.square().sum() - shifted.sum().square() / x.numel()) / x.numel()).clamp(min=0)
    mean = first + shifted.sum() / x.numel()
    deviation, size = (each.sqrt().clamp(max=LARGEST).float() for each in (variance, variance + mean**2))
    return torch.maximum(clip * deviation, size)


def quantise(x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other."""
    parts = [x.new_empty(0, dtype=torch.uint8)]
    for view, scale, level in encoded(x, segments, keys, form, measure):
        if form.base3:
            body = pack_ternary(level)
        else:
            sign = (view.view(torch.int32) < 0).to(torch.int32)
            body = pack_bits(level.abs() | sign << (form.bits - 1), form.bits)
        parts += [scale.contiguous().view(torch.uint8) if scale.numel() else parts[0], body]
    return torch.cat(parts)


def quantise_levels(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> tuple[Tensor, Tensor]:
    """Scales float32 (B,) and signed levels int32 (K,)."""
    made, levels = [x[:0]], [x.new_empty(0, dtype=torch.int32)]
    for _, scale, level in encoded(x, segments, keys, form, measure):
        made.append(scale)
        levels.append(level)
    return torch.cat(made), torch.cat(levels)


def encoded(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """View, scales and signed levels of each tensor."""
    views, blocks = segments.views(x), [form.blocks_in(n) for n in segments.sizes]
    if measure.scales is None:
        given = [scales_of(view, form, measure) for view in views]
    else:
        given = list(torch.split(measure.scales, blocks)) if blocks else []
    for number, (view, scale) in enumerate(zip(views, given, strict=True)):
        if not bool(torch.isfinite(view).all()) or not bool(torch.isfinite(scale).all()):
            raise not_finite(number, segments)
    if measure.floors is not None:
        least = torch.split(measure.floors, blocks) if blocks else ()
        views = [
            torch.where(view.abs() < spread(floor, view, form), 0.0, view)
            for view, floor in zip(views, least, strict=True)
        ]
    rounds = zip(views, given, keys, strict=True)
    return [(view, scale, rounded(view, scale, key, form)) for view, scale, key in rounds]


def rounded(x: Tensor, scales: Tensor, key: int, form: Form) -> Tensor:
    """Signed levels int32 (n,) of one tensor."""
    most = torch.tensor(ONE if form.powers else ONE * form.levels, dtype=torch.float32, device=x.device)
    small = (scales > 0) & (scales < TINY)
    z = torch.where(small, scales * ENLARGE, scales)
    inv = most / z
    inv = torch.where(inv * z < most, torch.nextafter(inv, torch.full_like(inv, torch.inf)), inv)
    inv = torch.where(scales == 0, 0.0, inv)  # a level of nothing is 0
    size = x.abs()
    size = torch.where(spread(small, x, form), size * ENLARGE, size)
    y = torch.minimum(size * spread(inv, x, form), most)
    if form.powers:
        bits = y.view(torch.int32)
        low = y * 2.0 ** (form.levels - 1)  # in the cell of 0, where it is less than ONE
        above = bits >= (127 + 16 + 1 - form.levels) << 23
        level = torch.where(above, (bits >> 23) - (127 + 16 - form.levels), 0)
        threshold = torch.where(above, (bits & 0x7FFFFF) << 1, (low.clamp(max=ONE) * 256).to(torch.int32))
    else:
        level = (y.to(torch.int64) >> 16).to(torch.int32)
        threshold = ((y - (level << 16)) * 256).to(torch.int32)
    level = level + (dither24(key, x.numel(), device=x.device) < threshold)
    return torch.where(x.view(torch.int32) < 0, -level, level)


def spread(per_block: Tensor, x: Tensor, form: Form) -> Tensor:
    """One value a block as one an element."""
    n = x.numel()
    return per_block.repeat_interleave(form.block or max(n, 1))[:n]


def values(signed: Tensor, scales: Tensor, form: Form) -> Tensor:
    """Float32 (n,) of the signed levels of one tensor."""
    if form.powers:
        bits = (127 + signed.abs() - form.levels) << 23
        size = torch.where(signed != 0, bits.view(torch.float32), 0.0)
        size = torch.where(signed < 0, -size, size)
    else:
        size = signed.to(torch.float32) / torch.tensor(float(form.levels), device=signed.device)
    return size * spread(scales, signed, form)


def dequantise_add_(wire: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float) -> Tensor:
    """out += alpha * values, once the whole wire has been found valid."""
    total = form.message_nbytes(segments)
    if wire.numel() != total:
        raise WireError(f"a message of {total} bytes is expected, got {wire.numel()}")
    made, levels, at = [wire.new_empty(0, dtype=torch.float32)], [wire.new_empty(0, dtype=torch.int32)], 0
    for number, n in enumerate(segments.sizes):
        head, body = 4 * form.blocks_in(n), form.codes_nbytes(n)
        scale = wire[at : at + head].clone().view(torch.float32)
        if not bool((torch.isfinite(scale) & (scale.view(torch.int32) >= 0)).all()):
            raise WireError(f"the scale of a block of tensor {number} is negative or not finite")
        made.append(scale)
        levels.append(unpacked(wire[at + head : at + head + body].contiguous(), n, form))
        at += head + body
    return levels_add_(torch.cat(levels), torch.cat(made), segments, out, form, alpha)


def unpacked(wire: Tensor, n: int, form: Form) -> Tensor:
    """Signed levels int32 (n,) of the codes of one tensor."""
    if form.base3:
        return unpack_ternary(wire, n)
    codes = unpack_bits(wire, form.bits, n)
    level = codes & (1 << (form.bits - 1)) - 1
    if n and int(level.max()) > form.levels:
        raise WireError(f"there are levels up to {form.levels}, got {int(level.max())}")
    return torch.where(codes >> (form.bits - 1) != 0, -level, level)


def levels_add_(
    signed: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float
) -> Tensor:
    """out += alpha * values, in two roundings: never one fused multiply-add."""
    parts = torch.split(signed, list(segments.sizes)) if len(segments) else ()
    heads = torch.split(scales, [form.blocks_in(n) for n in segments.sizes]) if len(segments) else ()
    for part, head, view in zip(parts, heads, segments.views(out), strict=True):
        view.add_(values(part, head, form) * alpha)
    return out
