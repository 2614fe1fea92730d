"""Gaps of adaptive widths in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.entropy.reference import gaps_of, indices_of
from laconic.kernels.gap_widths.widths import HEADER, WIDTH, best_widths, header_bits

LENGTHS = 32


def lengths_of(gaps: Tensor) -> Tensor:
    powers = 1 << torch.arange(LENGTHS - 1, device=gaps.device, dtype=torch.int64)
    return torch.searchsorted(powers, gaps, right=True)


def plan_of(lengths: Tensor) -> tuple[int, ...]:
    return best_widths(torch.bincount(lengths, minlength=LENGTHS).tolist())


def bits_of(values: Tensor, widths: Tensor) -> Tensor:
    starts = torch.cumsum(widths, 0) - widths
    owner = torch.repeat_interleave(
        torch.arange(values.numel(), device=values.device, dtype=torch.int64), widths
    )
    return (
        values[owner]
        >> (torch.arange(owner.numel(), device=values.device, dtype=torch.int64) - starts[owner])
        & 1
    )


def values_of(bits: Tensor, widths: Tensor) -> Tensor:
    starts = torch.cumsum(widths, 0) - widths
    owner = torch.repeat_interleave(
        torch.arange(widths.numel(), device=bits.device, dtype=torch.int64), widths
    )
    places = torch.arange(owner.numel(), device=bits.device, dtype=torch.int64) - starts[owner]
    return torch.zeros_like(widths).index_add_(0, owner, bits << places)


def gap_widths_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    wires = [torch.empty(0, dtype=torch.uint8, device=indices.device)]
    for gaps in torch.split(gaps_of(indices, counts), counts.tolist()):
        if not gaps.numel():
            continue
        lengths = lengths_of(gaps)
        widths = torch.tensor(plan_of(lengths), device=gaps.device, dtype=torch.int64)
        flag_bits = widths.numel().bit_length() - 1
        chosen = torch.searchsorted(widths, lengths)
        head = torch.cat(
            [torch.tensor([flag_bits], device=gaps.device, dtype=torch.int64), widths, chosen, gaps]
        )
        each = torch.full_like(head, WIDTH)
        each[0] = HEADER
        each[1 + widths.numel() :] = flag_bits
        each[head.numel() - gaps.numel() :] = widths[chosen]
        wires.append(bitpack.pack_bits(bits_of(head, each), 1))
    return torch.cat(wires)


def gap_widths_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Refuse widths that are not the best, and gaps in too large a width."""
    gaps = torch.zeros(int(counts.sum()), dtype=torch.int64, device=wire.device)
    for part, n in zip(torch.split(gaps, counts.tolist()), segments.sizes, strict=True):
        if part.numel():
            wire = wire[_decode(wire, part, n) :]
    if wire.numel():
        raise WireError("the wire goes on after the last gap")
    return indices_of(gaps + 1, counts, segments)


def _decode(wire: Tensor, gaps: Tensor, n: int) -> int:
    k, used = gaps.numel(), min(wire.numel(), 6)
    head = bitpack.unpack_bits(wire[:used], 1, 8 * used).to(torch.int64)
    flag_bits = int(values_of(head[:HEADER], head.new_full((1,), min(HEADER, head.numel()))))
    first = header_bits(flag_bits)
    flags_end = first + k * flag_bits
    if flags_end > 8 * wire.numel():
        raise WireError("the wire ends before the last gap")
    widths = values_of(
        head[HEADER:first], torch.full((1 << flag_bits,), WIDTH, device=wire.device, dtype=torch.int64)
    )
    used = (flags_end + 7) // 8
    bits = bitpack.unpack_bits(wire[:used], 1, 8 * used).to(torch.int64)
    chosen = values_of(bits[first:flags_end], torch.full_like(gaps, flag_bits))
    each = widths[chosen]
    end = flags_end + int(each.sum())
    used = (end + 7) // 8
    if used > wire.numel():
        raise WireError("the wire ends before the last gap")
    bits = bitpack.unpack_bits(wire[:used], 1, 8 * used).to(torch.int64)
    if bool(bits[end:].any()):
        raise WireError("the bits after the last gap must be zero")
    gaps.copy_(values_of(bits[flags_end:end], each))
    if int((gaps + 1).sum()) > n:
        raise WireError("a position lies outside its tensor")
    lengths = lengths_of(gaps)
    snug = torch.equal(torch.searchsorted(widths, lengths), chosen)
    if not snug or plan_of(lengths) != tuple(widths.tolist()):
        raise WireError("these gaps fit better widths than the wire's")
    return used
