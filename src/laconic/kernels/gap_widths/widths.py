"""Choice of the widths of a tensor's gaps: fewest bits, equal on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

Ending = Mapping[int, tuple[int, tuple[int, ...]]]

MOST = 8  # widths
HEADER = 2  # bits of their number
WIDTH = 5  # bits of each


def header_bits(flag_bits: int) -> int:
    return HEADER + (WIDTH << flag_bits)


def best_widths(histogram: Sequence[int]) -> tuple[int, ...]:
    """Return 1, 2, 4 or 8 ascending widths from the number of gaps of each bit length, not all 0.

    Dynamic programming over the last width. Ties go to fewer, then smaller widths.

    >>> best_widths([50, 0, 40, 0, 0, 0, 0, 3]), best_widths([500, 0, 400, 0, 0, 0, 0, 30])
    ((2, 7), (0, 1, 2, 7))
    """
    last = max(length for length, count in enumerate(histogram) if count)
    upto = [sum(histogram[: length + 1]) for length in range(last + 1)]
    ending: Ending = {w: (upto[w] * w, (w,)) for w in range(last + 1)}
    choices = []
    for count in range(1, min(MOST, last + 1) + 1):
        flag_bits = count.bit_length() - 1
        if count == 1 << flag_bits:
            bits, widths = ending[last]
            choices.append((header_bits(flag_bits) + upto[last] * flag_bits + bits, widths))
        ending = {w: _longer(w, ending, upto) for w in list(ending)[1:]}
    return min(choices, key=itemgetter(0))[1]


def _longer(w: int, ending: Ending, upto: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    lists = ((bits + (upto[w] - upto[v]) * w, (*before, w)) for v, (bits, before) in ending.items() if v < w)
    return min(lists, key=itemgetter(0))


def gap_widths_bound(k: int, n: int) -> int:
    """Return the most bytes of at most k positions among n.

    The encoder is never worse than one width for the largest gap, nor than two: at most (n - 1) / 2^a gaps
    have more than a bits.
    """
    k = min(k, n)
    if k == 0:
        return 0
    longest = (n - 1).bit_length()
    one = header_bits(0) + k * longest
    two = [header_bits(1) + k * (1 + a) + min(k, n - 1 >> a) * (longest - a) for a in range(longest)]
    return (min(one, *two) + 7) // 8 if two else (one + 7) // 8
