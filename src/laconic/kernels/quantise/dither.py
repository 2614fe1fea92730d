"""Dither of many tensors in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.philox.reference import LOW, LOWER_KEY, MULTIPLIERS, ROUNDS, WEYL

LOWER_WORDS = (LOWER_KEY & LOW, LOWER_KEY >> 32)


def dither(group: Tensor, keys: Tensor) -> Tensor:
    """Return elements [16 g, 16 g + 16) of a key's dither for groups g.

    keys int64 (2, ...): low and high words, broadcast with `group`.
    """
    c0 = torch.stack([2 * group, 2 * group + 1, group], dim=-1)  # 8 halves of words, 8 more, and 16 bytes
    k0, k1 = (torch.stack([k, k, k ^ lower], dim=-1) for k, lower in zip(keys, LOWER_WORDS, strict=True))
    four = torch.stack(philox(c0, k0, k1), dim=-1)  # (..., 3, 4)
    shape = group.shape
    halves = four.view(torch.int16).view(*shape, 3, 4, 4)[..., :2, :, :2].to(torch.int32)
    bytes_ = four.view(torch.uint8).view(*shape, 3, 4, 8)[..., 2, :, :4].to(torch.int32)
    upper = halves.reshape(*shape, 16).bitwise_and_(0xFFFF).bitwise_left_shift_(8)
    return upper.bitwise_or_(bytes_.reshape(*shape, 16))


def philox(counter: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Return four words, int64 below 2^32, of each counter below 2^62."""
    c0, c1 = counter & LOW, counter >> 32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the sign wraps, the 64 bits are right
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW)
        c1, c3 = p1.bitwise_and_(LOW), p0.bitwise_and_(LOW)
        k0, k1 = k0 + WEYL[0], k1 + WEYL[1]  # high bits are cut off above
    return c0, c1, c2, c3
