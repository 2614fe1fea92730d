"""Sum over ranks of small integers, in as few bits as possible: levels up, sums down.

With b bits and size N, (N-1)/N * b + 1/N * (b + about log2 N) bits per integer, each message counted
once. An all_reduce needs whole bytes.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import combined

BLOCK = 8  # integers of any width that fill whole bytes; chunks are multiples of it
SUM_BITS = 30  # maximum width of a sum


def integer_sum(wire: Tensor, n: int, most: int, comm: Comm) -> Tensor:
    """Return sums over ranks of n integers in 0..most, equal on all; packed as in `kernels.packed_sum`."""
    counts, up, down = _cut(n, most, comm.size)
    return combined(comm, wire, up, down, lambda chunks: kernels.packed_sum(chunks, counts[comm.rank], most))


@lru_cache(maxsize=512)
def _cut(n: int, most: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    bits, sum_bits = most.bit_length(), (most * size).bit_length()
    chunk = BLOCK * _chunk_blocks(n, size)
    counts = tuple(max(0, min(chunk, n - chunk * rank)) for rank in range(size))
    up, down = (tuple(kernels.packed_nbytes(count, each) for count in counts) for each in (bits, sum_bits))
    return counts, up, down


def integer_sum_nbytes(n: int, most: int) -> int:
    """Return the bytes that a rank sends in `integer_sum`: the most in a group of any size.

    The maximum occurs on a rank with a whole chunk, in the smallest group for some width of the sums.

    >>> integer_sum_nbytes(8000, most=2), 8 * 2500 / 8000  # of 2 or 4 ranks
    (2500, 2.5)
    """
    bits = most.bit_length()
    sizes = [-(-(1 << bits + more - 1) // most) for more in range(1, SUM_BITS - bits + 1)]
    extra = (_chunk_blocks(n, size) * ((most * size).bit_length() - bits) for size in sizes)
    return kernels.packed_nbytes(n, bits) + max(extra)


def _chunk_blocks(n: int, size: int) -> int:
    return -(-n // (BLOCK * size))
