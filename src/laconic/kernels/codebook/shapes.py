"""Number of values of a codebook, and bits per code."""

from __future__ import annotations


def bits_for(entries: int) -> int:
    """Return the least b with 2^b >= entries.

    >>> [bits_for(k) for k in (1, 2, 3, 256)]
    [0, 1, 2, 8]
    """
    return (entries - 1).bit_length()


def hierarchy_shape(n: int, levels: int) -> tuple[int, int]:
    entries = min(levels, n)
    return (entries, 1 + bits_for(entries)) if n else (0, 0)


def quantile_shape(n: int, bins: int) -> tuple[int, int]:
    entries = min(bins, n)
    return (entries, bits_for(entries)) if n else (0, 0)


def powers_shape(n: int, levels: int) -> tuple[int, int]:
    return (1, 1 + levels.bit_length()) if n else (0, 0)
