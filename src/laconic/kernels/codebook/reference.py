"""Codebooks in plain torch. Means are float64 sums, in any order, rounded to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.codebook.shapes import hierarchy_shape, powers_shape, quantile_shape

LEAST = 2.0**-149


def pack(book: Tensor, codes: Tensor, bits: int) -> Tensor:
    packed = bitpack.pack_bits(codes, bits) if bits else codes.new_empty(0, dtype=torch.uint8)
    return torch.cat([book.view(torch.uint8) if book.numel() else packed[:0], packed])


def unpack(wire: Tensor, shape: tuple[int, int], n: int) -> tuple[Tensor, Tensor]:
    numbers, bits = shape
    book, packed = wire[: 4 * numbers].clone().view(torch.float32), wire[4 * numbers :]
    if not bool(torch.isfinite(book).all()):
        raise WireError("a codebook holds numbers that are no means")
    if n * bits % 8 and int(packed[-1]) >> n * bits % 8:
        raise WireError("the bits after the last code must be zero")
    codes = (
        bitpack.unpack_bits(packed, bits, n)
        if bits
        else torch.zeros(n, device=wire.device, dtype=torch.int32)
    )
    return book, codes.to(torch.int64)


def known(codes: Tensor, entries: int) -> Tensor:
    if bool((codes >= entries).any()):
        raise WireError("a code is not in its codebook")
    return codes


def means(values: Tensor, groups: Tensor, count: int) -> Tensor:
    if not values.is_cpu:  # GPU additions to few addresses are serial
        ordered, order = groups.sort(stable=True)
        each = torch.arange(count, dtype=groups.dtype, device=values.device)
        ends = torch.searchsorted(ordered, each, right=True)
        lengths = ends - torch.searchsorted(ordered, each)
        total = torch.segment_reduce(values[order].double(), "sum", lengths=lengths, unsafe=True)
        return (total / lengths).float()
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    sizes = torch.bincount(groups, minlength=count)
    return (sums.index_add_(0, groups, values.double()) / sizes).float()


def by_rank(values: Tensor, groups: int, descending: bool) -> Tensor:
    """Return rank * groups // n of each value; the lower index first among equals."""
    n = values.numel()
    order = torch.argsort(values, descending=descending, stable=True)
    return torch.empty_like(order).index_copy_(
        0, order, torch.arange(n, device=values.device, dtype=torch.int64) * groups // max(n, 1)
    )


def hierarchy_encode(x: Tensor, levels: int) -> Tensor:
    entries, bits = hierarchy_shape(x.numel(), levels)
    groups = by_rank(x.abs(), entries, descending=True)
    codes = torch.signbit(x).to(torch.int64) << max(bits - 1, 0) | groups
    return pack(means(x.abs(), groups, entries), codes, bits)


def hierarchy_decode(wire: Tensor, n: int, levels: int) -> Tensor:
    entries, bits = hierarchy_shape(n, levels)
    book, codes = unpack(wire, (entries, bits), n)
    if bool(torch.signbit(book).any()):
        raise WireError("a codebook holds numbers that are no means")
    top = 1 << max(bits - 1, 0)
    values = book[known(codes & top - 1, entries)]
    return torch.where(codes >= top, -values, values)


def quantile_encode(x: Tensor, bins: int) -> Tensor:
    """Encode bins, ascending; negative values get their share, at least one."""
    n, below = x.numel(), x < 0
    entries, bits = quantile_shape(n, bins)
    negative = int(below.sum())
    share = (2 * entries * negative + n) // max(2 * n, 1)
    if 0 < negative < n:
        share = min(max(share, 1), entries - 1)
    groups = torch.zeros(n, dtype=torch.int64, device=x.device)
    groups[below] = by_rank(x[below], share, descending=False)
    groups[~below] = by_rank(x[~below], entries - share, descending=False) + share
    return pack(means(x + 0.0, groups, entries), groups, bits)


def quantile_decode(wire: Tensor, n: int, bins: int) -> Tensor:
    shape = quantile_shape(n, bins)
    book, codes = unpack(wire, shape, n)
    return book[known(codes, shape[0])]


def powers_encode(x: Tensor, bounds: Tensor) -> Tensor:
    """Encode levels; thresholds are above zero."""
    n = x.numel()
    numbers, bits = powers_shape(n, bounds.numel())
    size = x.abs()
    largest = size.max().reshape(1) if n else size
    limits = (largest * bounds.to(x.device)).clamp_(min=LEAST) if n else largest
    levels = torch.searchsorted(limits, size, right=True)
    codes = torch.where(levels > 0, torch.signbit(x).to(torch.int64) << max(bits - 1, 0) | levels, 0)
    return pack(largest[:numbers], codes, bits)


def powers_decode(wire: Tensor, n: int, powers: Tensor) -> Tensor:
    shape = powers_shape(n, powers.numel())
    largest, codes = unpack(wire, shape, n)
    if bool(torch.signbit(largest).any()):
        raise WireError("a codebook holds numbers that are no means")
    top = 1 << max(shape[1] - 1, 0)
    levels = known(codes & top - 1, powers.numel() + 1)
    if bool((codes == top).any()):
        raise WireError("a code is not in its codebook")
    zero = torch.zeros(1, device=wire.device, dtype=torch.float32)
    values = torch.cat([zero, largest * powers.to(wire.device)])[levels] if n else zero[:0]
    return torch.where(codes >= top, -values, values)
