"""Magnitude thresholds of a SWAT layer, refreshed periodically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.selector import kept
from laconic.sparsity.bitmask import nbytes, pack, threshold


class Thresholds:
    """Thresholds of one layer.

    Every `refresh` batches they keep the ceil(density * n) largest of n entries, and ties; then the density
    drifts.
    """

    def __init__(self, density: float, refresh: int) -> None:
        self.density, self.refresh = density, refresh
        self.batches = 0
        self.weight = self.input = 0.0
        self.kept_bytes = self.dense_bytes = 0

    @property
    def due(self) -> bool:
        return self.batches % self.refresh == 0

    def exact(self, x: Tensor) -> float:
        return threshold(x, kept(self.density, x.numel()))

    def of_weight(self, weight: Tensor, training: bool) -> float:
        return self.weight if training and not self.due else self.exact(weight)

    def batch(self, x: Tensor, weight: Tensor, training: bool) -> tuple[float, tuple[Tensor, Tensor]]:
        if training and not self.due:
            least, of_input = self.weight, self.input
        else:
            least, of_input = self.exact(weight), self.exact(x)
        if training and x.numel():
            self.weight, self.input = least, of_input
            self.batches += 1
        packed = (
            pack(x, of_input) if weight.requires_grad else (x.new_empty(0, dtype=torch.uint8), x.new_empty(0))
        )
        self.kept_bytes, self.dense_bytes = nbytes(*packed), nbytes(x) if weight.requires_grad else 0
        return least, packed

    def state_dict(self) -> dict[str, Any]:
        return {
            "density": self.density,
            "refresh": self.refresh,
            "batches": self.batches,
            "weight": self.weight,
            "input": self.input,
        }

    def check(self, state: Any) -> None:
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            held = ", ".join(map(str, state)) if isinstance(state, dict) else repr(state)
            raise StateError(f"not saved by a sparse layer: it has {held or 'nothing'}")
        numbers = (state["weight"], state["input"])
        if type(state["batches"]) is not int or any(type(each) not in (int, float) for each in numbers):
            raise StateError(f"not saved by a sparse layer: its numbers are {[*state.values()]}")
        for name, own in (("density", self.density), ("refresh", self.refresh)):
            if state[name] != own:
                raise StateError(
                    f"saved with {name} {state[name]}, but this layer has {own}: use the same arguments"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.weight, self.input = state["batches"], state["weight"], state["input"]

    def __repr__(self) -> str:
        return f"density={self.density:.4g}, refresh={self.refresh}"
