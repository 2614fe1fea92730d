"""The extra-gradient step with the user's own optimiser, and without a closure.

    Theta' = Theta - eta grad(Theta)        the first of two calls of `optimizer.step()`
    Theta  <- Theta - eta grad(Theta')      the second, with the next batch

Korpelevich 1976; with a batch of its own for each half, Juditsky, Nemirovski and Tauvel 2011,
arXiv:0809.0815. The second call starts from Theta, and from the optimiser's state as it was before the first:
the prediction leaves no trace in momentum.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Prediction:
    """Makes each second step of an optimiser start where the one before it did.

    `ahead`: whether the parameters are Theta' now, between the two calls.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.ahead = False
        self._optimizer = optimizer
        self._behind: list[tuple[Tensor, Tensor, dict[str, Any] | None]] = []

    @torch.no_grad()
    def before_step(self) -> None:
        """Note Theta before the first call; go back to it before the second, whose gradients stay."""
        state = self._optimizer.state
        if not self.ahead:
            held = (each for group in self._optimizer.param_groups for each in group["params"])
            self._behind = [
                (each, each.detach().clone(), _copied(state[each]) if each in state else None)
                for each in held
            ]
            return
        self.back()

    @torch.no_grad()
    def back(self) -> None:
        """Go back to Theta, and to the optimiser's state there."""
        state = self._optimizer.state
        for parameter, value, kept in self._behind:
            parameter.copy_(value)
            if kept is not None:
                state[parameter] = kept
            else:
                state.pop(parameter, None)
        self._behind = []

    def after_step(self) -> bool:
        """Whether the call that has ended was the second one, so that a whole step is done."""
        self.ahead = not self.ahead
        return not self.ahead


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in state.items()
    }
