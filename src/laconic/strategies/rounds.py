"""The rounds of a rank that has run out of inputs, under torch's `Join`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from laconic.strategies.strategy import Update


def nothing() -> None:
    """The update of a step that is skipped."""


class Rounds(JoinHook):
    """Takes a rank's rounds for it, with a loss by which it never leads.

    Args:
        take: A round of the strategy, with this update and loss.
        update: Makes the update of a round without inputs.
    """

    def __init__(self, take: Callable[[Update, float | None], None], update: Callable[[], Update]) -> None:
        self._take = take
        self._update = update

    def main_hook(self) -> None:
        self._take(self._update(), math.inf)
