"""Bases of optimisers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.closure import evaluate


class CheckedOptimizer(Optimizer):
    """Base that checks settings, and updates all parameters with a gradient."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `SpecError` for settings out of range."""

    @abstractmethod
    def update_group_(self, ws: list[Tensor], group: Mapping[str, Any]) -> None:
        """Update parameters of a group, which have dense gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the result of `closure`, called once before.

        Raises `AttachError` for an unsupported gradient.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            ws = [w for w in group["params"] if w.grad is not None]
            for w in ws:
                refuse_sparse(w.grad, type(self).__name__)
            self.update_group_(ws, group)
        return loss


class PerTensor(CheckedOptimizer):
    """Base that updates each tensor separately; refuses complex ones."""

    @abstractmethod
    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        """Update `w` with its gradient `g`."""

    def update_group_(self, ws: list[Tensor], group: Mapping[str, Any]) -> None:
        for w in ws:
            if w.is_complex():
                raise AttachError(
                    f"{type(self).__name__} is for real parameters, and this one is {w.dtype}: give"
                    " its real and imaginary parts as two parameters"
                )
            assert w.grad is not None
            self.update_(w, w.grad, group)


def refuse_sparse(grad: Tensor, optimiser: str) -> None:
    if grad.is_sparse:
        raise AttachError(
            f"{optimiser} needs dense gradients, and this one, {tuple(grad.shape)}, is sparse: build the"
            " Embedding without sparse=True, or give it to torch.optim.SparseAdam"
        )
