"""Random draws in integer arithmetic, equal on every machine and in every release.

Number i of a key is the i-th output of SplitMix64 (Steele et al. 2014) from the key.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP = np.uint64(0x9E3779B97F4A7C15)


def bits(key: int, n: int) -> NDArray[np.uint64]:
    """Return `n` random 64-bit numbers.

    >>> [hex(number) for number in bits(0, 2).tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    state = np.uint64(key) + STEP * np.arange(1, n + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def order(key: int, n: int) -> Tensor:
    """Return a uniformly random permutation of 0..n-1, int64 (n,).

    >>> sorted(order(5, 4).tolist())
    [0, 1, 2, 3]
    """
    return torch.from_numpy(np.argsort(bits(key, n), kind="stable").astype(np.int64))
