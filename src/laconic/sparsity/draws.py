"""Random draws of a key, on the host: equal in every process."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(n: int, count: int, key: int) -> Tensor:
    """`count` of n entries, bool (n,)."""
    used = torch.zeros(n, dtype=torch.bool, device="cpu")
    used[shuffled(n, key)[:count]] = True
    return used


def shuffled(n: int, key: int) -> Tensor:
    """0..n-1 in an order of this key's, int64 (n,)."""
    return torch.randperm(n, generator=generator(key), dtype=torch.int64, device="cpu")


def generator(key: int) -> torch.Generator:
    """Random numbers of this 64-bit key."""
    return torch.Generator("cpu").manual_seed((key & ((1 << 64) - 1)) >> 1)
