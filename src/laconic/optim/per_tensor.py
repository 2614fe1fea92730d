"""Optimisers that update each tensor by itself: what they share around the update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerTensor(Optimizer):
    """Checks the settings of every parameter group, and updates what has a gradient."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `SpecError` for settings that no group can have."""

    @abstractmethod
    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        """One update of tensor `w` with its gradient `g`, under the settings of its group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of parameters, as `torch.optim.Optimizer` takes it. Wrong settings: `SpecError`."""
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self.update_(w, w.grad, group)
        return loss
