"""Base of the optimisers that update each tensor by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerTensor(Optimizer):
    """Checks the settings of every parameter group, and updates all parameters with a gradient."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `SpecError` if a setting is outside its range."""

    @abstractmethod
    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        """Update tensor `w` with its gradient `g` and the settings of its group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Raises `SpecError` if a setting is outside its range."""
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss again; called once, before the update. Default: none.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self.update_(w, w.grad, group)
        return loss
