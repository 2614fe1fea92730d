"""Coins: random bits that replace the sign of a zero, independent of the counting rank and the bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.turn import Turn


@dataclass(frozen=True)
class Coins:
    """Coins of one step, eight per byte uint8, by tensor; odd steps negate the even step before.

    >>> even, odd = Coins(Turn(6)).common("w", 0, 5), Coins(Turn(7)).common("w", 0, 5)
    >>> bool((even + odd == 255).all())
    True
    """

    turn: Turn

    def own(self, name: str, first: int, count: int) -> Tensor:
        return self._of(self._even.own(name), first, count)

    def common(self, name: str, first: int, count: int) -> Tensor:
        return self._of(self._even.common(name), first, count)

    @cached_property
    def _even(self) -> Turn:
        return replace(self.turn, step=self.turn.step // 2 * 2)

    def _of(self, key: int, first: int, count: int) -> Tensor:
        offset = first // 4
        words = kernels.philox(key, -(-(first + count) // 4) - offset, offset)
        drawn = words.view(torch.uint8)[first - 4 * offset :][:count]
        return drawn.bitwise_not() if self.turn.step % 2 else drawn
