"""Gap codes in plain torch: what the native kernels must equal, byte for byte."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.entropy.bounds import low_nbytes, rice_most, rice_parameters


def firsts(counts: Tensor) -> Tensor:
    """Where each segment's first index lies in the list, int64 (s,)."""
    return torch.cumsum(counts, 0) - counts


def spread(values: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """A value of each segment, repeated for each of its indices, on the device of `like`."""
    return torch.repeat_interleave(values, counts).to(like.device)


def gaps_of(indices: Tensor, counts: Tensor) -> Tensor:
    """Elements skipped before each index, int64 (K,); negative where indices do not ascend."""
    wide = indices.to(torch.int64)
    before = torch.cat([wide.new_full((1,), -1), wide])[: wide.numel()]
    before[firsts(counts)[counts > 0].to(wide.device)] = -1
    return wide - before - 1


def indices_of(gaps: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """The inverse of `gaps_of`, int32 (K,). Raises `WireError` for an index outside its segment."""
    places = torch.cumsum(gaps + 1, 0)
    ends = pad(places, (1, 0))[firsts(counts).to(gaps.device)]  # what the segments before have added
    indices = places - 1 - torch.repeat_interleave(ends, counts.to(gaps.device))
    if bool((indices >= spread(segments.sizes_tensor, counts, indices)).any()):
        raise WireError("a position lies outside its tensor")
    return indices.to(torch.int32)


def ascending(indices: Tensor, counts: Tensor, segments: Segments) -> bool:
    """True if every gap is at least 0 and every index inside its segment."""
    inside = indices < spread(segments.sizes_tensor, counts, indices)
    return bool(((gaps_of(indices, counts) >= 0) & inside).all())


def rice_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Low bits of each segment's gaps, then one unary stream of all high parts: q zeros and a one each."""
    gaps = gaps_of(indices, counts)
    parameters = rice_parameters(counts, segments)
    low = [
        bitpack.pack_bits(part, r)
        for part, r in zip(torch.split(gaps, counts.tolist()), parameters.tolist(), strict=True)
        if r
    ]
    ones = torch.cumsum((gaps >> spread(parameters, counts, gaps)) + 1, 0) - 1
    unary = gaps.new_zeros(int(ones[-1]) + 1 if ones.numel() else 0)
    unary[ones] = 1
    return torch.cat([*low, bitpack.pack_bits(unary, 1)])


def rice_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """The way back; a wire longer than any encoder makes is refused before it is unpacked."""
    if wire.numel() > rice_most(counts, segments):
        raise WireError("the wire goes on after the last gap")
    parameters = rice_parameters(counts, segments)
    lengths = low_nbytes(counts, parameters)
    split = int(lengths.sum())
    if wire.numel() < split:
        raise WireError(f"the low bits of the gaps fill {split} bytes, got {wire.numel()}")
    gaps = torch.zeros(int(counts.sum()), dtype=torch.int64, device=wire.device)
    parts = zip(
        torch.split(wire[:split], lengths.tolist()),
        torch.split(gaps, counts.tolist()),
        parameters.tolist(),
        strict=True,
    )
    for part, to, r in parts:
        if r:
            used = to.numel() * r % 8
            if used and int(part[-1]) >> used:
                raise WireError("the bits after the low bits of a tensor's gaps must be zero")
            to.copy_(bitpack.unpack_bits(part, r, to.numel()))
    unary = wire[split:]
    ones = bitpack.unpack_bits(unary, 1, 8 * unary.numel()).nonzero().flatten()
    if ones.numel() != gaps.numel() or (unary.numel() and not int(unary[-1])):
        raise WireError(f"{gaps.numel()} gaps end with a one each and fill the wire, got {ones.numel()} ones")
    high = torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1
    each = spread(parameters, counts, gaps)
    if bool((high > spread(segments.sizes_tensor, counts, gaps) >> each).any()):
        raise WireError("a position lies outside its tensor")
    gaps += high << each
    return indices_of(gaps, counts, segments)


def delta_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """LEB128 of the gaps: at most five bytes each, of which as many are kept as are needed."""
    gaps = gaps_of(indices, counts)
    shifts = 7 * torch.arange(5, device=gaps.device)
    septets = (gaps[:, None] >> shifts) & 127
    more = (gaps[:, None] >> (shifts + 7)) > 0
    needed = torch.cat([torch.ones_like(more[:, :1]), more[:, :-1]], dim=1)
    return (septets + 128 * more).to(torch.uint8)[needed]


def delta_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """The way back; refuses gaps that end with a needless zero byte or have more than five bytes."""
    last = wire < 128
    ends = last.nonzero().flatten()
    total = int(counts.sum())
    if ends.numel() != total or (wire.numel() and not bool(last[-1])):
        raise WireError(f"{total} gaps are expected, the bytes hold {ends.numel()} whole ones")
    starts = pad(ends + 1, (1, 0))[:-1]
    lengths = ends - starts + 1
    if bool((lengths > 5).any()) or bool(((wire[ends] == 0) & (lengths > 1)).any()):
        raise WireError("a gap has more bytes than it needs")
    owner = torch.repeat_interleave(torch.arange(total, device=wire.device), lengths)
    place = torch.arange(wire.numel(), device=wire.device) - starts[owner]
    septets = (wire & 127).to(torch.int64) << 7 * place
    return indices_of(septets.new_zeros(total).index_add_(0, owner, septets), counts, segments)
