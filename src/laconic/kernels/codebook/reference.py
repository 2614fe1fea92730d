"""Codebooks in plain torch, all tensors at once. Means are float64 sums, in any order, rounded to float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.codebook.shapes import hierarchy_shape, powers_shape, quantile_shape

LEAST = 2.0**-149
NOT_FINITE = "a codebook cannot hold NaN or Inf: skip this step, it has no gradient"
DAMAGED = (
    "a codebook holds numbers that are no means",
    "the bits after the last code must be zero",
    "a code is not in its codebook",
)


@dataclass(frozen=True)
class Places:
    """One value per tensor, int64 (s,). `of`: each element's tensor, int64 (n,), if there are several.

    `base`: first value in the joined codebooks. `sign`: sign bit of a code.
    """

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    of: Tensor
    size: Tensor
    first: Tensor
    entries: Tensor
    base: Tensor
    sign: Tensor

    @classmethod
    def at(cls, segments: Segments, shape: Callable[[int], tuple[int, int]], device: torch.device) -> Places:
        sizes, shapes = segments.sizes, tuple(map(shape, segments.sizes))
        columns = _columns(sizes, shapes, device)
        of = columns[0][:0]
        if len(sizes) > 1:
            of = torch.repeat_interleave(columns[0], output_size=segments.numel)
        return cls(sizes, shapes, of, *columns)

    def each(self, column: Tensor) -> Tensor:
        return column[self.of] if len(self.sizes) > 1 else column

    def rank(self) -> Tensor:
        n = sum(self.sizes)
        return torch.arange(n, dtype=torch.int64, device=self.of.device) - self.each(self.first)

    def of_bits(self) -> dict[int, list[int]]:
        tensors: dict[int, list[int]] = {}
        for i, (_, bits) in enumerate(self.shapes):
            if bits:
                tensors.setdefault(bits, []).append(i)
        return tensors

    def nbytes(self, i: int) -> int:
        return (self.sizes[i] * self.shapes[i][1] + 7) // 8


def _columns(
    sizes: tuple[int, ...], shapes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, ...]:
    entries = tuple(numbers for numbers, _ in shapes)
    firsts, bases = ([*accumulate(each, initial=0)][:-1] for each in (sizes, entries))
    signs = [1 << max(bits - 1, 0) for _, bits in shapes]
    columns = torch.tensor([sizes, firsts, entries, bases, signs], dtype=torch.int64, device="cpu")
    return sent_to(columns, device).unbind()


def pack(book: Tensor, codes: Tensor, at: Places) -> Tensor:
    runs, zeros = torch.split(codes, [*at.sizes]), codes.new_zeros(8)
    packed = [book[:0].view(torch.uint8)] * len(at.sizes)
    for bits, tensors in at.of_bits().items():
        joined = [part for i in tensors for part in (runs[i], zeros[: -at.sizes[i] % 8])]
        wide = bitpack.pack_bits(torch.cat(joined), bits)
        lengths = [-(-at.sizes[i] // 8) * bits for i in tensors]
        for i, part in zip(tensors, torch.split(wide, lengths), strict=True):
            packed[i] = part[: at.nbytes(i)]
    books = torch.split(book.view(torch.uint8), [4 * numbers for numbers, _ in at.shapes])
    return torch.cat([part for pair in zip(books, packed, strict=True) for part in pair])


def unpack(wire: Tensor, at: Places) -> tuple[Tensor, Tensor, Tensor]:
    """Return books, codes int64 (n,), and whether padding is not zero."""
    lengths = [n for i, (numbers, _) in enumerate(at.shapes) for n in (4 * numbers, at.nbytes(i))]
    parts, zeros = torch.split(wire, lengths), wire.new_zeros(32)
    nothing = wire.new_zeros(max(at.sizes, default=0), dtype=torch.int32)
    codes, after = [nothing[:n] for n in at.sizes], [nothing[:0]]
    for bits, tensors in at.of_bits().items():
        joined = [part for i in tensors for part in (parts[2 * i + 1], zeros[: -at.nbytes(i) % bits])]
        wide = [-(-at.sizes[i] // 8) * 8 for i in tensors]
        found = bitpack.unpack_bits(torch.cat(joined), bits, sum(wide))
        for i, part in zip(tensors, torch.split(found, wide), strict=True):
            codes[i] = part[: at.sizes[i]]
            after.append(part[at.sizes[i] :])
    book = torch.cat(parts[::2]).view(torch.float32)
    return book, torch.cat(codes).to(torch.int64), torch.cat(after).any()


def finite(x: Tensor, segments: Segments) -> Tensor:
    flat = segments.joined.gathered(x)
    bad = torch.isfinite(flat).all().logical_not().to(torch.int32).view(1)
    check(bad, lambda _: NonFiniteError(NOT_FINITE))
    return flat


def order_of(keys: Tensor, at: Places) -> Tensor:
    return torch.argsort(at.of * (1 << 32) + keys if len(at.sizes) > 1 else keys, stable=True)


def means(values: Tensor, groups: Tensor, count: int) -> Tensor:
    each = torch.arange(count + 1, dtype=groups.dtype, device=values.device)
    lengths = torch.searchsorted(groups, each).diff()
    total = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
    return (total / lengths).float()


def grouped(values: Tensor, group: Tensor, order: Tensor, at: Places) -> tuple[Tensor, Tensor]:
    book = means(values[order], at.each(at.base) + group, sum(numbers for numbers, _ in at.shapes))
    return book, torch.empty_like(group).index_copy_(0, order, group)


def hierarchy_encode(x: Tensor, segments: Segments, levels: int) -> Tensor:
    if not segments.numel:
        return x.new_empty(0, dtype=torch.uint8)
    flat, at = finite(x, segments), Places.at(segments, lambda n: hierarchy_shape(n, levels), x.device)
    size = flat.abs()
    order = order_of(-size.view(torch.int32), at)
    book, codes = grouped(size, at.rank() * at.each(at.entries) // at.each(at.size), order, at)
    return pack(book, torch.where(torch.signbit(flat), at.each(at.sign), 0) | codes, at)


def quantile_encode(x: Tensor, segments: Segments, bins: int) -> Tensor:
    if not segments.numel:
        return x.new_empty(0, dtype=torch.uint8)
    flat, at = finite(x, segments) + 0.0, Places.at(segments, lambda n: quantile_shape(n, bins), x.device)
    n, entries, negative = at.size, at.entries, (flat < 0).double()
    below = torch.segment_reduce(negative, "sum", lengths=n, unsafe=True).to(torch.int64)
    share = (2 * entries * below + n) // (2 * n).clamp(min=1)
    mixed = (below > 0) & (below < n)
    share = torch.where(mixed, torch.minimum(share.clamp(min=1), entries - 1), share)
    bits = flat.view(torch.int32)
    order, rank = order_of(bits ^ (bits >> 31 & 0x7FFFFFFF), at), at.rank()
    first = at.each(below)
    low = rank * at.each(share) // first.clamp(min=1)
    high = (rank - first) * at.each(entries - share) // at.each(n - below).clamp(min=1) + at.each(share)
    return pack(*grouped(flat, torch.where(rank < first, low, high), order, at), at)


def powers_encode(x: Tensor, segments: Segments, bounds: Tensor) -> Tensor:
    if not segments.numel:
        return x.new_empty(0, dtype=torch.uint8)
    levels, sign = bounds.numel(), 1 << bounds.numel().bit_length()
    flat, at = finite(x, segments), Places.at(segments, lambda n: powers_shape(n, levels), x.device)
    size = flat.abs()
    largest = torch.segment_reduce(size, "max", lengths=at.size, unsafe=True, initial=0)
    level = levels_of(size, largest, bounds.to(x.device), at)
    present = torch.tensor([i for i, n in enumerate(at.sizes) if n], dtype=torch.int64, device="cpu")
    return pack(
        largest[sent_to(present, x.device)],
        torch.where((level > 0) & torch.signbit(flat), sign, 0) | level,
        at,
    )


def levels_of(size: Tensor, largest: Tensor, bounds: Tensor, at: Places) -> Tensor:
    if len(at.sizes) == 1:
        return torch.searchsorted((largest * bounds).clamp_(min=LEAST), size, right=True)
    scale, level = at.each(largest), torch.zeros_like(size, dtype=torch.int64)
    for bit in reversed(range(len(bounds).bit_length())):
        above = level + (1 << bit)
        limit = (scale * bounds[above.clamp(max=len(bounds)) - 1]).clamp_(min=LEAST)
        level = torch.where((above <= len(bounds)) & (limit <= size), above, level)
    return level


def hierarchy_add_(wire: Tensor, segments: Segments, out: Tensor, levels: int, alpha: float) -> Tensor:
    if not segments.numel:
        return out
    at = Places.at(segments, lambda n: hierarchy_shape(n, levels), wire.device)
    book, codes, after = unpack(wire, at)
    sign, entries = at.each(at.sign), at.each(at.entries)
    group = codes & sign - 1
    bad = [~valid(book, signed=False), after, (group >= entries).any()]
    values = book[at.each(at.base) + torch.minimum(group, entries - 1)]
    return add_(out, torch.where(codes >= sign, -values, values), segments, alpha, bad)


def quantile_add_(wire: Tensor, segments: Segments, out: Tensor, bins: int, alpha: float) -> Tensor:
    if not segments.numel:
        return out
    at = Places.at(segments, lambda n: quantile_shape(n, bins), wire.device)
    book, codes, after = unpack(wire, at)
    entries = at.each(at.entries)
    bad = [~valid(book, signed=True), after, (codes >= entries).any()]
    return add_(out, book[at.each(at.base) + torch.minimum(codes, entries - 1)], segments, alpha, bad)


def powers_add_(wire: Tensor, segments: Segments, out: Tensor, powers: Tensor, alpha: float) -> Tensor:
    if not segments.numel:
        return out
    levels, sign = powers.numel(), 1 << powers.numel().bit_length()
    at = Places.at(segments, lambda n: powers_shape(n, levels), wire.device)
    largest, codes, after = unpack(wire, at)
    level = codes & sign - 1
    bad = [~valid(largest, signed=False), after, ((level > levels) | (codes == sign)).any()]
    factors = torch.cat([powers.new_zeros(1), powers]).to(wire.device)
    values = largest[at.each(at.base)] * factors[level.clamp(max=levels)]
    return add_(out, torch.where(codes >= sign, -values, values), segments, alpha, bad)


def valid(book: Tensor, *, signed: bool) -> Tensor:
    fine = torch.isfinite(book)
    return (fine if signed else fine & ~torch.signbit(book)).all()


def add_(out: Tensor, values: Tensor, segments: Segments, alpha: float, bad: list[Tensor]) -> Tensor:
    flags = torch.stack(bad)
    check(flags.to(torch.int32), lambda i: WireError(DAMAGED[i]))
    scaled = values * alpha
    if not out.is_cpu:
        scaled = scaled.masked_fill_(flags.any(), -0.0)
    return segments.add_(out, scaled)
