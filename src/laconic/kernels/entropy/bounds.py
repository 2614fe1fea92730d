"""How long these codes can get, and the Rice parameter, in integers: both ends agree. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks

LONGEST_GAP = 5  # bytes of LEB128 that a gap below 2^31 can take


def rice_parameter(k: int, n: int) -> int:
    """Low bits of each gap: the least r >= 0 with 2^r >= 0.48125 (n / k - 1/2).

    >>> [rice_parameter(k, 1000) for k in (0, 1, 10, 40, 1000)]
    [0, 9, 6, 4, 0]
    """
    r = 0
    while k and (320 * k) << r < 77 * (2 * n - k):
        r += 1
    return r


def rice_parameters(counts: Tensor, segments: Segments) -> Tensor:
    """`rice_parameter` of each segment, int64 (s,): how many r are too small.

    a 2^r < b is written as a < ceil(b / 2^r), which does not overflow.
    """
    k, n = counts[:, None], segments.sizes_tensor[:, None]
    return ((k > 0) & (320 * k < -(-77 * (2 * n - k) >> torch.arange(32)))).sum(dim=1)


def low_nbytes(counts: Tensor, r: Tensor) -> Tensor:
    """Bytes of each segment's low bits, int64 (s,)."""
    return (counts * r + 7) >> 3


def rice_most(counts: Tensor, segments: Segments) -> int:
    """The most bytes that these counts can take: a segment's high parts add up to (n - k) >> r at most."""
    r = rice_parameters(counts, segments)
    unary = int((counts + ((segments.sizes_tensor - counts) >> r) * (counts > 0)).sum())
    return int(low_nbytes(counts, r).sum()) + (unary + 7) // 8


def rice_bound(k: int, n: int) -> int:
    """The most bytes that at most k positions among n can take.

    For each parameter r the size grows with the count, so the largest count of every r up to k's is tried.
    """
    most = 0
    for r in range(rice_parameter(k, n), 32):
        last = n if r == 0 else (154 * n - 1) // (77 + (320 << (r - 1)))  # largest count with parameter >= r
        count = min(k, n, last)
        if count > 0:
            most = max(most, (count * r + 7) // 8 + (count + ((n - count) >> r) + 7) // 8)
    return most


def check_counts(counts: Tensor, segments: Segments) -> None:
    """Raise `WireError` unless 0 <= count <= size for every segment, `ValueError` for a segment too long."""
    checks.addressable(segments.sizes)
    if bool(((counts < 0) | (counts > segments.sizes_tensor)).any()):
        raise WireError("a count lies outside 0 .. the size of its tensor")
