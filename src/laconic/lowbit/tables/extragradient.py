"""Extra-gradient step with any optimiser, without a closure.

    Theta' = Theta - eta grad(Theta)        the first of two calls of `optimizer.step()`
    Theta  <- Theta - eta grad(Theta')      the second, with the next batch

Korpelevich 1976; with different batches for the halves, Juditsky, Nemirovski and Tauvel 2011,
arXiv:0809.0815. The prediction does not change momentum.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Prediction:
    """Starting point of each second step. `ahead`: whether the parameters are Theta'."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.ahead = False
        self._optimizer = optimizer
        self._before: list[tuple[Tensor, Tensor, dict[str, Any] | None]] = []

    @torch.no_grad()
    def before_step(self) -> None:
        state = self._optimizer.state
        if not self.ahead:
            held = (each for group in self._optimizer.param_groups for each in group["params"])
            self._before = [
                (each, each.detach().clone(), _clone_state(state[each]) if each in state else None)
                for each in held
            ]
            return
        self.back()

    @torch.no_grad()
    def back(self) -> None:
        state = self._optimizer.state
        for parameter, value, kept in self._before:
            parameter.copy_(value)
            if kept is not None:
                state[parameter] = kept
            else:
                state.pop(parameter, None)
        self._before = []

    def after_step(self) -> bool:
        self.ahead = not self.ahead
        return not self.ahead


def _clone_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in state.items()
    }
