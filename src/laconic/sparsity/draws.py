"""Random draws from a key, on the host, equal in every process."""

from __future__ import annotations

import torch
from torch import Tensor


def random_mask(n: int, count: int, key: int) -> Tensor:
    used = torch.zeros(n, dtype=torch.bool, device="cpu")
    used[permutation(n, key)[:count]] = True
    return used


def permutation(n: int, key: int) -> Tensor:
    return torch.randperm(n, generator=generator(key), dtype=torch.int64, device="cpu")


def generator(key: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed((key & ((1 << 64) - 1)) >> 1)
