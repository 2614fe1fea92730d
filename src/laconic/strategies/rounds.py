"""Rounds of a rank that has run out of inputs, under torch's `Join`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from laconic.strategies.strategy import Update


def nothing() -> None:
    """Do nothing."""


class Rounds(JoinHook):
    """Join hook whose rounds have an infinite loss: this rank never leads."""

    def __init__(self, take: Callable[[Update, float | None], None], update: Callable[[], Update]) -> None:
        self._take = take
        self._update = update

    def main_hook(self) -> None:
        self._take(self._update(), math.inf)
