"""Signs and mean magnitudes in plain torch; native means are within 1 ulp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.philox.reference import streams, without_padding
from laconic.kernels.tiles import table

PIECE = 4096  # elements summed at once
GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: bit j of the top byte is byte j
BAD_MEAN = "a mean magnitude is negative or not finite"
BAD_PADDING = "the bits after the last sign of a tensor must be zero"


@dataclass(frozen=True)
class Blocks:
    """Blocks per tensor: their number, and the length of the last one."""

    counts: tuple[int, ...]
    last: tuple[int, ...]
    length: int  # except the last

    def lengths(self, device: torch.device) -> Tensor:
        if self.length == 0:
            return table(tuple(last for last in self.last if last), device)
        lengths = torch.full((sum(self.counts),), self.length, dtype=torch.int64, device=device)
        at, ends = 0, []
        for count in self.counts:
            at += count
            ends += [at - 1] if count else []
        shorter = tuple(last for last in self.last if last)
        return lengths.index_copy_(0, table(tuple(ends), device), table(shorter, device))


@lru_cache(maxsize=512)
def blocks_of(sizes: tuple[int, ...], block: int) -> Blocks:
    counts = tuple(-(-n // block) if block else min(n, 1) for n in sizes)
    last = tuple(n - (count - 1) * block if count else 0 for n, count in zip(sizes, counts, strict=True))
    return Blocks(counts, last, block)


def sums(x: Tensor, lengths: Tensor, longest: int, pieces: int) -> Tensor:
    """Return float64 sums of |x| over blocks, in `pieces` of up to `PIECE` elements."""
    magnitudes = x.abs().to(torch.float64)
    if longest <= PIECE:
        return torch.segment_reduce(magnitudes, "sum", lengths=lengths, unsafe=True)
    counts = (lengths + (PIECE - 1)) >> PIECE.bit_length() - 1
    inner = torch.full((pieces,), PIECE, dtype=torch.int64, device=x.device)
    present = counts.clamp(min=1)
    inner.index_copy_(0, counts.cumsum(0) - 1, lengths - (present - 1) * PIECE)
    partial = torch.segment_reduce(magnitudes, "sum", lengths=inner, unsafe=True)
    return torch.segment_reduce(partial, "sum", lengths=counts, unsafe=True)


def means(x: Tensor, sizes: tuple[int, ...], block: int) -> Tensor:
    if not x.numel():
        return torch.empty(0, dtype=torch.float32, device=x.device)
    blocks = blocks_of(sizes, block)
    lengths = blocks.lengths(x.device)
    longest = max(min(n, block or n) for n in sizes)
    pieces = sum(
        -(-last // PIECE) + (count - 1) * -(-block // PIECE)
        for count, last in zip(blocks.counts, blocks.last, strict=True)
        if count
    )
    return (sums(x, lengths, longest, pieces) / lengths).to(torch.float32)


def pack(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pack flags bool to uint8; each tensor starts a new byte."""
    if len(sizes) == 1:
        padded = pad(flags, (0, -flags.numel() % 8)) if flags.numel() % 8 else flags
    elif any(n % 8 for n in sizes):
        zeros = torch.zeros(8, dtype=torch.bool, device=flags.device)
        parts = [
            part
            for run, n in zip(torch.split(flags, list(sizes)), sizes, strict=True)
            for part in ((run, zeros[: -n % 8]) if n % 8 else (run,))
        ]
        padded = torch.cat(parts)
    else:
        padded = flags
    return (padded.view(torch.int64) * GATHER >> 56).to(torch.uint8)


def unpacked(bits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return sign masks: -2^31 where a bit is set."""
    masks = _masks(bits.device).index_select(0, bits.to(torch.int32)).view(-1)
    return without_padding(masks, sizes, 8)


@lru_cache(maxsize=16)
def _masks(device: torch.device) -> Tensor:
    byte = torch.arange(256, dtype=torch.int32, device="cpu")[:, None]
    masks = byte >> torch.arange(8, dtype=torch.int32, device="cpu") << 31
    return masks.to(device)  # blocking: other streams may use it


def flipped(masks: Tensor, values: Tensor) -> Tensor:
    return (values.view(torch.int32) ^ masks).view(torch.float32)


def padded_wrongly(bits: Tensor, sizes: Sequence[int]) -> Tensor:
    places, shifts = _ends(tuple(sizes))
    if not places:
        return torch.zeros((), dtype=torch.bool, device=bits.device)
    return (bits.index_select(0, table(places, bits.device)) >> table(shifts, bits.device)).any()


@lru_cache(maxsize=512)
def _ends(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    at, places = 0, []
    for n in sizes:
        at += (n + 7) // 8
        if n % 8:
            places.append(at - 1)
    return tuple(places), tuple(n % 8 for n in sizes if n % 8)


def tossed(bits: Tensor, x: Tensor, sizes: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Replace the sign bits of zeros of x by bits of the keys' streams."""
    zero = x == 0
    if x.is_cpu and not zero.any():
        return bits
    packed = pack(zero, sizes)
    nbytes = [(n + 7) // 8 for n in sizes]
    coins = streams([(key, 0, (m + 15) // 16) for key, m in zip(keys, nbytes, strict=True)], x.device)
    return bits ^ (without_padding(coins.view(torch.uint8), nbytes, 16) ^ bits) & packed


def interleaved(first: Tensor, second: Tensor, firsts: Sequence[int], seconds: Sequence[int]) -> Tensor:
    if len(firsts) == 1:
        return torch.cat([first, second])
    pairs = zip(torch.split(first, list(firsts)), torch.split(second, list(seconds)), strict=True)
    return torch.cat([x for pair in pairs for x in pair])


def apart(wire: Tensor, firsts: Sequence[int], seconds: Sequence[int]) -> tuple[Tensor, Tensor]:
    runs = torch.split(wire, [n for pair in zip(firsts, seconds, strict=True) for n in pair])
    return torch.cat(runs[::2]), torch.cat(runs[1::2])


def sign_encode(
    x: Tensor, segments: Segments, block: int, keys: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    sizes = segments.sizes
    if not segments.numel:
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        return nothing, torch.zeros(1, dtype=torch.int32, device=x.device)
    flat = segments.joined.gathered(x)
    scales = means(flat, sizes, block)
    bits = pack(torch.signbit(flat), sizes)
    if keys is not None:
        bits = tossed(bits, flat, sizes, keys)
    heads = [4 * count for count in blocks_of(sizes, block).counts]
    wire = interleaved(scales.view(torch.uint8), bits, heads, [(n + 7) // 8 for n in sizes])
    return wire, scales.isfinite().all().logical_not().to(torch.int32).view(1)


def sign_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float, block: int) -> Tensor:
    sizes = segments.sizes
    if not segments.numel:
        return out
    blocks = blocks_of(sizes, block)
    head, bits = apart(wire, [4 * count for count in blocks.counts], [(n + 7) // 8 for n in sizes])
    scales = head.view(torch.float32)
    bad = (torch.signbit(scales) | ~scales.isfinite()).any()
    scaled = scales * alpha
    n = segments.numel
    if len(scaled) == 1:
        values = scaled.expand(n)
    elif len(sizes) == 1:
        values = scaled.repeat_interleave(block, output_size=len(scaled) * block)[:n]
    else:
        values = scaled.repeat_interleave(blocks.lengths(out.device), output_size=n)
    return _add_signed_(out, segments, values, bits, bad)


def _add_signed_(out: Tensor, segments: Segments, values: Tensor, bits: Tensor, bad: Tensor) -> Tensor:
    """Add values with their signs, unless `bad` or nonzero padding."""
    flags = torch.stack([bad, padded_wrongly(bits, segments.sizes)])
    check(flags.to(torch.int32), lambda i: WireError((BAD_MEAN, BAD_PADDING)[i]))
    signed = flipped(unpacked(bits, segments.sizes), values)
    if not out.is_cpu:  # flags may be read later
        signed = signed.masked_fill_(flags.any(), -0.0)
    return segments.add_(out, signed)


def signs(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    flat, sizes = segments.joined.gathered(x), segments.sizes
    scales = means(flat, sizes, 0)
    if 0 in sizes:
        full = torch.zeros(len(sizes), dtype=torch.float32, device=x.device)
        present = tuple(i for i, n in enumerate(sizes) if n)
        scales = full.index_copy_(0, table(present, x.device), scales)
    return pack(torch.signbit(flat), sizes), scales


def zeros(x: Tensor, segments: Segments) -> Tensor:
    return pack(segments.joined.gathered(x) == 0, segments.sizes)


def signed_add_(bits: Tensor, values: Tensor, segments: Segments, out: Tensor, alpha: float) -> Tensor:
    if not segments.numel:
        return out
    lengths, fine = table(segments.sizes, out.device), torch.zeros((), dtype=torch.bool, device=out.device)
    scaled, n = values * alpha, segments.numel
    each = scaled.expand(n) if len(scaled) == 1 else scaled.repeat_interleave(lengths, output_size=n)
    return _add_signed_(out, segments, each, bits, fine)
