"""Elias omega codes in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import WireError

GROUPS = 5  # of the longest code: widths 2, 3, 5, 31 and the final zero


def width_of(values: Tensor) -> Tensor:
    powers = 1 << torch.arange(1, 32, device=values.device, dtype=torch.int64)
    return torch.searchsorted(powers, values, right=True) + 1


def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, first bit highest, and lengths."""
    bits, lengths = torch.zeros_like(values), torch.ones_like(values)
    for _ in range(GROUPS):
        more, width = values > 1, width_of(values)
        bits = torch.where(more, bits | values << lengths, bits)
        lengths = torch.where(more, lengths + width, lengths)
        values = torch.where(more, width - 1, values)
    return bits, lengths


def elias_encode(values: Tensor) -> Tensor:
    codes, lengths = codes_of(values.to(torch.int64))
    ends = torch.cumsum(lengths, 0)
    owner = torch.repeat_interleave(
        torch.arange(values.numel(), device=values.device, dtype=torch.int64), lengths
    )
    places = ends[owner] - 1 - torch.arange(owner.numel(), device=values.device, dtype=torch.int64)
    bits = pad(codes[owner] >> places & 1, (0, -owner.numel() % 8)).view(-1, 8)
    return (
        (bits << torch.arange(7, -1, -1, device=values.device, dtype=torch.int64)).sum(dim=1).to(torch.uint8)
    )


def elias_decode(wire: Tensor, count: int) -> Tensor:
    """Read the code at each bit, then follow the chain of real ones."""
    total = 8 * wire.numel()
    bits = (
        wire[:, None].to(torch.int64) >> torch.arange(7, -1, -1, device=wire.device, dtype=torch.int64) & 1
    ).flatten()
    words = pad(bits, (0, 64))
    for half in (1, 2, 4, 8, 16):
        words = words << half | pad(words[half:], (0, half))
    start = torch.arange(total + 1, device=wire.device, dtype=torch.int64)
    at, values, fits = start.clone(), torch.ones_like(start), torch.ones_like(start, dtype=torch.bool)
    for _ in range(GROUPS):
        word = words[at.clamp(max=total + 32)]
        more = fits & (word >> 31 > 0)
        fits &= ~more | (values < 31)
        more &= fits
        width = torch.where(more, values + 1, 0)
        values = torch.where(more, word >> (32 - width), values)
        at += width
    jumps = (at + 1).clamp(max=total)
    chain = start[:1].clone()
    for _ in range(max(count, 1).bit_length()):
        chain = torch.cat([chain, jumps[chain]])[: count + 1]
        jumps = jumps[jumps]
    starts = chain[:count]
    if count and not bool(fits[starts].all()):
        raise WireError("a code is of 2^31 or more")
    end = int(at[starts[-1]]) + 1 if count else 0
    if end > total:
        raise WireError("the wire ends before the last code")
    if total - end >= 8 or bool(bits[end:].any()):
        raise WireError("the wire goes on after the last code")
    return values[starts].to(torch.int32)
