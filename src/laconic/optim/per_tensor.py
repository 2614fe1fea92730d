"""Base of optimisers that update each tensor independently."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.closure import evaluate


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

        Raises:
            AttachError: A gradient is sparse or complex.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    refuse_sparse(w.grad, type(self).__name__)
                    if w.is_complex():
                        raise AttachError(
                            f"{type(self).__name__} is for real parameters, and this one is {w.dtype}: give"
                            " its real and imaginary parts as two parameters"
                        )
                    self.update_(w, w.grad, group)
        return loss


def refuse_sparse(grad: Tensor, optimiser: str) -> None:
    """Raise `AttachError` for a sparse gradient."""
    if grad.is_sparse:
        raise AttachError(
            f"{optimiser} needs dense gradients, and this one, {tuple(grad.shape)}, is sparse: build the"
            " Embedding without sparse=True, or give it to torch.optim.SparseAdam"
        )
