"""Gap codes in plain torch.

A table has a column per segment: the number of operations does not depend on segments or messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.entropy.bounds import low_nbytes, rice_parameters, unary_most
from laconic.kernels.entropy.tables import BITS, Numbers, constant, expanded, uploaded

MARK = 0x80  # byte around each unary part: its one separates messages
LAST = 15  # most bits from a unary part's last one to the next mark
NEVER = 1 << 40


def firsts_of(counts: Numbers) -> Numbers:
    return np.cumsum(counts) - counts


def numbers(counts: Tensor, segments: Segments) -> tuple[Numbers, Numbers]:
    given = counts.numpy()
    some = given > 0
    return given[some], segments.sizes_tensor.numpy()[some]


def steps_of(indices: Tensor, firsts: Tensor) -> Tensor:
    """Return distances from the index before, or from -1 at `firsts`."""
    wide = indices.to(torch.int64)
    return wide - wide.roll(1).index_fill_(0, firsts, -1)


def gaps_of(indices: Tensor, counts: Tensor) -> Tensor:
    """Return the elements skipped before each index; negative where indices do not ascend."""
    given = counts.numpy()
    return steps_of(indices, uploaded(firsts_of(given[given > 0]), indices.device)) - 1


def indices_of(steps: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Return indices. Raises `WireError` for one outside its tensor."""
    total = steps.numel()
    if not total:
        return steps.to(torch.int32)
    k, n = numbers(counts, segments)
    table = uploaded(np.stack([firsts_of(k), n, k]), steps.device)
    first, size = expanded(table[:2], table[2], total)
    places = relative(steps, first)
    wrong = ((size - places) >> 63).any()
    return refused(places - 1, wrong, "a position lies outside its tensor").to(torch.int32)


def relative(steps: Tensor, first: Tensor) -> Tensor:
    sums = torch.cumsum(steps, 0)
    return sums - (sums - steps).index_select(0, first)


def refused(values: Tensor, wrong: Tensor, error: str) -> Tensor:
    """Return the values. Raise `WireError` if `wrong`; on a GPU later, and return zeros."""
    if wrong.is_cpu:
        if bool(wrong):
            raise WireError(error)
        return values
    deferred.check(wrong.to(torch.int32).view(1), lambda _: WireError(error))
    return values.masked_fill(wrong, 0)


def ascending(indices: Tensor, counts: Tensor, segments: Segments) -> bool:
    return not bool(disorder(indices, counts.numpy(), segments.sizes_tensor.numpy()))


def disorder(indices: Tensor, counts: Numbers, sizes: Numbers) -> Tensor:
    some = counts > 0
    k = counts[some]
    table = uploaded(np.stack([sizes[some] - 1, k, firsts_of(k)]), indices.device)
    (last,) = expanded(table[:1], table[1], indices.numel())
    gaps = steps_of(indices, table[2]) - 1
    return ((gaps | (last - indices)) >> 63).any()


def rice_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Encode low bits, then all high parts q in unary: q zeros and a one.

    Words of 32 bits are stored in 64 for the overflow.
    """
    total, device = indices.numel(), indices.device
    if not total:
        return torch.empty(0, dtype=torch.uint8, device=device)
    k, n = numbers(counts, segments)
    r = rice_parameters(k, n)
    low, first = low_nbytes(k, r), firsts_of(k)
    unary = int(low.sum())
    at = 8 * (np.cumsum(low) - low) - (first + 8 * unary) * r
    table = uploaded(np.stack([n - 1, r, (1 << r) - 1, at, k, first]), device)
    last, shift, mask, place = expanded(table[:4], table[4], total)
    order = torch.arange(8 * unary, 8 * unary + total, dtype=torch.int64, device=device)
    gaps = steps_of(indices, table[5]) - 1
    ends = torch.cumsum(gaps >> shift, 0) + order
    fits = (gaps | (last - indices)).amin()
    end, least = torch.stack([ends[-1], fits]).tolist()
    if least < 0:
        raise ValueError(NOT_ASCENDING)
    nbytes = (end >> 3) + 1
    words = torch.zeros((nbytes + 3) // 4, dtype=torch.int64, device=device)
    words.index_add_(0, ends >> 5, torch.bitwise_left_shift(1, ends & 31))
    if unary:
        places = torch.addcmul(place, order, shift)
        words.index_add_(0, places >> 5, (gaps & mask) << (places & 31))
    words[1:].add_(words[:-1] >> 32)
    return words.to(torch.int32).view(torch.uint8)[:nbytes]


NOT_ASCENDING = "indices must ascend inside their segments: sort them, count from the segment's start"


def rice_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    total = int(counts.sum())
    sizes = segments.sizes_tensor.numpy()
    places, wrong = rice_places([wire], counts.numpy()[None], sizes, np.full_like(sizes, -1))
    error = f"{total} gaps end with a one each, fill the wire and lead to positions inside their tensors"
    return refused(places, wrong, f"{error}: these bytes do not").to(torch.int32)


def rice_places(
    wires: Sequence[Tensor], counts: Numbers, sizes: Numbers, bases: Numbers
) -> tuple[Tensor, Tensor]:
    """Decode positions, which count from 1 plus their segment's `bases`."""
    device, messages = wires[0].device, len(wires)
    r = rice_parameters(counts, sizes)
    low = low_nbytes(counts, r)
    split = low.sum(axis=1)
    lengths = np.array([wire.numel() for wire in wires])
    over = lengths > split + unary_most(counts, sizes, r)
    for number in np.flatnonzero(over | (lengths < split))[:1].tolist():
        error = WireError(
            "the wire goes on after the last gap"
            if over[number]
            else f"the low bits of the gaps fill {split[number]} bytes, got {lengths[number]}"
        )
        error.message = number if messages > 1 else None
        raise error

    tables, marks = rice_tables(lengths, counts, sizes, bases)
    expected = np.cumsum(8 * (lengths - split + 1)) + MARK.bit_length() - 1
    flat = uploaded(np.concatenate([tables.ravel(), marks, expected]), device)
    table = flat[: tables.size].view(tables.shape)
    mark, where = flat[tables.size :].view(2, messages).unbind()

    total = int(marks[-1]) - 1
    first, shift, mask, scale, place, most, n, base = expanded(table[:8], table[8], total)
    border = constant((MARK,), device)
    parts = [border]
    for wire, start in zip(wires, split.tolist(), strict=True):
        parts += [wire[start:], border]
    unary = (torch.cat(parts)[:, None] & constant(BITS, device)).view(-1)
    if unary.is_cpu:
        ends = unary.nonzero().flatten()
        if ends.numel() != total + 2:
            return ends, torch.ones((), dtype=torch.bool, device="cpu")
    else:
        ends = torch.nonzero_static(unary, size=total + 2).flatten()
    distances = ends[1:] - ends[:-1]
    distances, end = distances[:-1], distances[-1:]
    order = torch.arange(total, dtype=torch.int64, device=device)
    places = torch.addcmul(place, order, shift)
    raw = pairs(wires, device).index_select(0, places >> 5) >> (places & 31)
    steps = torch.addcmul((raw & mask) - mask, distances, scale)
    found = relative(steps, first)
    wrong = torch.cat(
        [
            ((most - distances) | (n - found)) >> 63,
            (LAST - end) >> 63,
            raw.index_select(0, table[9]) & table[10],
            ends.index_select(0, mark) - where,
        ]
    ).any()
    return found + base, wrong


def rice_tables(lengths: Numbers, counts: Numbers, sizes: Numbers, bases: Numbers) -> tuple[Numbers, Numbers]:
    """Return int64 (11, t), one column per segment with positions, and each mark's index in the ends.

    A mark counts as a segment with one position.
    """
    r = rice_parameters(counts, sizes)
    low = low_nbytes(counts, r)
    gap = (np.arange(len(counts)) < len(counts) - 1).astype(np.int64)[:, None]
    zero = np.zeros_like(gap)
    per_segment = [
        np.concatenate([table, mark], axis=1)
        for table, mark in (
            (counts, gap),
            (r, zero),
            (8 * ((np.cumsum(lengths) - lengths)[:, None] + np.cumsum(low, axis=1) - low), zero),
            ((sizes >> r) + 1, zero + LAST),
            (np.broadcast_to(sizes, counts.shape), zero + NEVER),
            (np.broadcast_to(bases, counts.shape), zero),
        )
    ]
    some = per_segment[0] > 0
    k, r, at, most, n, base = (table[some] for table in per_segment)
    first, mask = firsts_of(k), (1 << r) - 1
    rest = ((1 << (-k * r & 7)) - 1) << r
    rows = np.stack([first, r, mask, mask + 1, at - first * r, most, n, base, k, first + k - 1, rest])
    return rows, np.cumsum(counts.sum(axis=1) + 1)


def pairs(wires: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 64 bits from each fourth byte of the joined wires."""
    spare = 12 + -sum(wire.numel() for wire in wires) % 4
    words = torch.cat([*wires, constant((0,) * spare, device)]).view(torch.int32)
    return words.unfold(0, 2, 1).contiguous().view(torch.int64).view(-1)


def delta_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    if not indices.numel():
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    gaps = gaps_of(indices, counts)
    shifts = torch.arange(0, 35, 7, dtype=torch.int64, device=gaps.device)
    rest = gaps[:, None] >> shifts
    more = rest > 127
    needed = rest > 0
    needed[:, 0] = True
    return ((rest & 127) + 128 * more).to(torch.uint8)[needed]


def delta_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Refuse gaps that end with a needless zero byte or exceed five bytes."""
    total, device = int(counts.sum()), wire.device
    if not total:
        return torch.empty(0, dtype=torch.int32, device=device)
    last = wire < 128
    if last.is_cpu:
        ends = last.nonzero().flatten()
        if ends.numel() != total or not bool(last[-1]):
            raise WireError(f"{total} gaps are expected, the bytes hold {ends.numel()} whole ones")
    else:
        ends = torch.nonzero_static(last, size=total + 1).flatten()
        whole = (ends[-1] == -1) & (ends[-2] == wire.numel() - 1)
        ends = refused(ends[:-1], ~whole, f"{total} gaps are expected, the bytes hold another number")
    lengths = torch.diff(ends, prepend=ends.new_full((1,), -1))
    needless = (lengths > 5) | ((wire.index_select(0, ends) == 0) & (lengths > 1))
    ends = refused(ends, needless.any(), "a gap has more bytes than it needs")
    owner = torch.cumsum(last, 0) - last.to(torch.int64)
    place = torch.arange(wire.numel(), dtype=torch.int64, device=device)
    place -= (ends + 1 - lengths).index_select(0, owner if owner.is_cpu else owner.clamp_(max=total - 1))
    septets = (wire & 127).to(torch.int64) << (7 * place if owner.is_cpu else 7 * place.clamp_(0, 4))
    steps = torch.ones(total, dtype=torch.int64, device=device).index_add_(0, owner, septets)
    return indices_of(steps, counts, segments)
