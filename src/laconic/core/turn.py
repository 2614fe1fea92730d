"""The current step and its random keys: 64-bit integers from (seed, step, tensor name, rank or "common").

Without generator state a resumed run draws the same bits, even if DDP has regrouped its buckets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MASK = (1 << 64) - 1
COMMON = MASK  # in place of the rank


@lru_cache(maxsize=65536)
def name_key(name: str) -> int:
    """Return a 64-bit hash, equal in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=512)
def _name_keys(names: tuple[str, ...]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([name_key(name) for name in names], dtype=np.uint64)


def mix(*parts: int) -> int:
    """Return one 64-bit integer, by the SplitMix64 finaliser (Steele et al. 2014).

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    state = 0
    for part in parts:
        state = (state + (part & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True)
class Turn:
    step: int
    rank: int = 0
    seed: int = 0

    def own(self, name: str) -> int:
        """Return a key of this rank."""
        return mix(self.seed, self.step, name_key(name), self.rank)

    def own_keys(self, names: tuple[str, ...]) -> list[int]:
        """Return `own` of several names.

        >>> Turn(3, rank=1).own_keys(("w", "b")) == [Turn(3, rank=1).own(name) for name in "wb"]
        True
        """
        state = np.full(len(names), mix(self.seed, self.step), dtype=np.uint64)
        for part in (_name_keys(names), np.uint64(self.rank & MASK)):
            state = state + part + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        keys: list[int] = state.tolist()
        return keys

    def common(self, name: str) -> int:
        """Return a key of all ranks."""
        return mix(self.seed, self.step, name_key(name), COMMON)
