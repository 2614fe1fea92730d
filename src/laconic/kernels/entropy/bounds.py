"""Maximum lengths of the codes, and the Rice parameter, in integers."""

from __future__ import annotations

import numpy as np

from laconic.kernels.entropy.tables import Numbers

LONGEST_GAP = 5  # LEB128 bytes of a gap below 2^31


def rice_parameter(k: int, n: int) -> int:
    """Return the low bits per gap: the least r >= 0 with 2^r >= 0.48125 (n / k - 1/2).

    >>> [rice_parameter(k, 1000) for k in (0, 1, 10, 40, 1000)]
    [0, 9, 6, 4, 0]
    """
    r = 0
    while k and (320 * k) << r < 77 * (2 * n - k):
        r += 1
    return r


def rice_parameters(counts: Numbers, sizes: Numbers) -> Numbers:
    """Return `rice_parameter` of each segment, int64.

    2^r >= b / a iff 2^r >= q = ceil(b / a): r is the bit length of q - 1.
    """
    k = np.maximum(counts, 1)
    q = -(-77 * (2 * sizes - k) // (320 * k))
    r = np.frexp((q - 1).astype(np.float64))[1].astype(np.int64)  # q < 2^31: exact
    return np.where(counts > 0, r, 0)


def low_nbytes(counts: Numbers, r: Numbers) -> Numbers:
    return (counts * r + 7) >> 3


def unary_most(counts: Numbers, sizes: Numbers, r: Numbers) -> Numbers:
    """Return the most bytes of the unary part: a segment's high parts sum to (n - k) >> r."""
    bits = np.where(counts > 0, counts + ((sizes - counts) >> r), 0)
    nbytes: Numbers = (bits.sum(axis=-1) + 7) >> 3
    return nbytes


def rice_bound(k: int, n: int) -> int:
    """Return the most bytes of at most k positions among n.

    For each parameter r the size grows with the count, so only the largest count is tried.
    """
    most = 0
    for r in range(rice_parameter(k, n), 32):
        last = n if r == 0 else (154 * n - 1) // (77 + (320 << (r - 1)))
        count = min(k, n, last)
        if count > 0:
            most = max(most, (count * r + 7) // 8 + (count + ((n - count) >> r) + 7) // 8)
    return most
