"""Philox4x32-10 in torch integers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOWER_KEY = 0xD1B54A32D192ED03  # the stream that breaks ties


def block(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words (int64 tensors below 2^32) of each counter, itself four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits, right though the sign wraps
        c0, c1, c2, c3 = ((p1 >> 32) & LOW) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def words(key: int, n: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """Elements [offset, offset + n) of the key's stream: int64 (n,), each below 2^32."""
    first = offset // 4
    counter = torch.arange(first, (offset + n + 3) // 4, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counter)
    four = block((counter & LOW, (counter >> 32) & LOW, zero, zero), (key & LOW, (key >> 32) & LOW))
    return torch.stack(four, dim=1).flatten()[offset - 4 * first :][:n]


def philox(key: int, n: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """The same elements as the bits of int32 (n,)."""
    stream = words(key, n, offset, device)
    return torch.where(stream >= 1 << 31, stream - (1 << 32), stream).to(torch.int32)


def uniform(key: int, n: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """The top 24 bits of each element as float32 in [0, 1): exact multiples of 2^-24."""
    return (words(key, n, offset, device) >> 8).to(torch.float32) * 2.0**-24


def dither24(key: int, n: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """Elements [offset, offset + n): half a word each of the key's stream, and a byte of another one."""
    upper = parts(key, 16, n, offset, device)
    return (upper << 8 | parts(key ^ LOWER_KEY, 8, n, offset, device)).to(torch.int32)


def parts(key: int, bits: int, n: int, offset: int, device: torch.device | None) -> Tensor:
    """Elements [offset, offset + n) of the key's stream cut in numbers of so many bits, low ones first."""
    each = 32 // bits
    first = offset // each
    stream = words(key, (offset + n + each - 1) // each - first, first, device)
    shifts = torch.arange(0, 32, bits, device=device)
    cut = stream[:, None] >> shifts & (1 << bits) - 1
    return cut.flatten()[offset - each * first :][:n]
