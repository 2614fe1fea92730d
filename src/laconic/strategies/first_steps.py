"""Warnings in the first steps: a second set of weights, or missing steps."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.warning import warn
from laconic.optim.outside_state import second_weights
from laconic.optim.step_watch import StepWatch
from laconic.optim.unwrapping import after_steps, stepping

STEP = 3  # earlier, momentum may equal the weights too
WITHIN = 0.25  # relative distance of a copy


class FirstSteps:
    def __init__(self, optimizer: Optimizer, strategy: str) -> None:
        self._strategy, self._steps = strategy, 0
        held = (each for group in optimizer.param_groups for each in group["params"])
        self._watch = StepWatch(f"laconic.distribute with {strategy}", optimizer, held)
        self._hook: RemovableHandle = after_steps(stepping(optimizer), self._after)

    def remove(self) -> None:
        self._hook.remove()
        self._watch.remove()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._watch.stepped()
        self._steps += 1
        if self._steps != STEP:  # a hook must not remove itself while torch iterates
            return
        if place := second_weights(optimizer, WITHIN):
            warn(
                f"{type(optimizer).__name__} seems to keep a second set of weights in {place}, and"
                f" {self._strategy} averages only the model's: where the optimiser puts those into the model,"
                " ranks come apart; a method that exchanges gradients, such as 'cgx()', keeps both alike",
            )
