"""Warning for an optimiser that makes a second set of weights in its first steps: no rank averages it."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.optim.entry import after_steps, stepping
from laconic.optim.outside_state import second_weights

STEP = 3  # by then momentum of a gradient that equals the weights is far from them
WITHIN = 0.25  # relative distance that the weights may have moved


class SecondWeightsWatch:
    """A hook that looks once, after the third step, as most optimisers make their state at the first."""

    def __init__(self, optimizer: Optimizer, strategy: str) -> None:
        self._strategy, self._steps = strategy, 0
        self._hook: RemovableHandle = after_steps(stepping(optimizer), self._after)

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps < STEP:
            return
        self.remove()
        if place := second_weights(optimizer, WITHIN):
            warnings.warn(
                f"{type(optimizer).__name__} seems to keep a second set of weights in {place}, and"
                f" {self._strategy} averages only the model's: where the optimiser puts those into the model,"
                " ranks come apart; a method that exchanges gradients, such as 'cgx()', keeps both alike",
                stacklevel=2,
            )
