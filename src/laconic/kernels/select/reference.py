"""Selection in plain torch, on the bits of |x|.

For floats that are not NaN, the bits of |x| read as an integer order like |x| itself: exact, denormals
included, in any rounding or flush mode. NaN becomes 0, and 0 is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.philox import reference as philox

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000

Chosen = tuple[Tensor, Tensor]


def magnitudes(x: Tensor) -> Tensor:
    """Bits of |x| as int32 (n,), 0 for NaN."""
    bits = x.view(torch.int32) & MAGNITUDE
    return torch.where(bits > INFINITY, 0, bits)


def _concatenated(parts: Iterable[Tensor], device: torch.device) -> Chosen:
    found = list(parts)
    counts = torch.tensor([part.numel() for part in found], dtype=torch.int64)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    return torch.cat([empty, *(part.to(torch.int32) for part in found)]), counts


def largest(bits: Tensor, k: int) -> Tensor:
    """Ascending positions of the k largest, the lower position first among equals, zeros never."""
    k = min(k, bits.numel())
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=bits.device)
    threshold = torch.topk(bits, k, sorted=False).values.min()
    more = bits > threshold
    ties = (bits == threshold).nonzero().flatten()[: k - int(more.sum())]
    more[ties] = True
    return (more & (bits > 0)).nonzero().flatten()


def topk(x: Tensor, segments: Segments, ks: Tensor) -> Chosen:
    """The ks largest |x| of each segment."""
    views = zip(segments.views(x), ks.tolist(), strict=True)
    return _concatenated((largest(magnitudes(view), k) for view, k in views), x.device)


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    """|x| >= threshold, and not zero."""

    def part(view: Tensor, least: int) -> Tensor:
        return (magnitudes(view) >= max(least, 1)).nonzero().flatten()

    levels = magnitudes(threshold).tolist()
    return _concatenated((part(v, t) for v, t in zip(segments.views(x), levels, strict=True)), x.device)


def lowered(level: int, factor: float) -> int:
    """Bits of float32(value of these bits * factor)."""
    value = torch.tensor(level, dtype=torch.int32).view(torch.float32)
    return int((value * factor).view(torch.int32))


def sampled_topk(
    x: Tensor,
    segments: Segments,
    ks: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    lower: float,
    rounds: int,
) -> Chosen:
    """The two-stage selection of DGC; see `laconic.kernels.sampled_topk`."""

    def part(view: Tensor, k: int, stride: int, m: int, rank: int, key: int) -> Tensor:
        bits = magnitudes(view)
        if k <= 0 or stride == 0:
            return largest(bits, k)
        start = int(philox.words(key, 1)[0]) * stride >> 32
        level = int(torch.topk(bits[start::stride][:m], rank, sorted=False).values.min())
        for left in range(rounds, -1, -1):
            candidates = (bits >= max(level, 1)).nonzero().flatten()
            if candidates.numel() > k:
                return candidates[largest(bits[candidates], k)]
            if candidates.numel() >= lower * k or level <= 1:
                return candidates
            if left:
                level = lowered(level, lower)
        return largest(bits, k)

    columns = [column.tolist() for column in (ks, *plan, keys)]
    rows = zip(segments.views(x), *columns, strict=True)
    return _concatenated((part(*row) for row in rows), x.device)


FEISTEL_ROUNDS = 12


def _mixed(word: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32-bit words held in int64."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & philox.LOW
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & philox.LOW
    return word ^ (word >> 16)


def permuted(position: Tensor, key: int, n: int) -> Tensor:
    """A keyed permutation of [0, n), applied to int64 positions: a Feistel network, walked until below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    round_keys = philox.words(key, FEISTEL_ROUNDS).tolist()

    def once(value: Tensor) -> Tensor:
        left, right = value >> half, value & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mixed((right + round_key) & philox.LOW) & mask)
        return (left << half) | right

    value = once(position)
    while bool((outside := value >= n).any()):
        value = torch.where(outside, once(value), value)
    return value


def random_indices(sizes: Tensor, ks: Tensor, keys: Tensor) -> Chosen:
    """k distinct positions of [0, n), from the key alone."""

    def part(n: int, k: int, key: int) -> Tensor:
        if k <= 0 or n <= 0:
            return torch.empty(0, dtype=torch.int64)
        if k >= n:
            return torch.arange(n)
        return permuted(torch.arange(k), key, n).sort().values

    rows: Iterable[tuple[int, int, int]] = zip(sizes.tolist(), ks.tolist(), keys.tolist(), strict=True)
    return _concatenated((part(*row) for row in rows), torch.device("cpu"))
