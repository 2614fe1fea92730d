"""LowBitTraining: what trains a model's weights towards few bits, as a spec; and what it does to a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from laconic.core.spec import Spec


class Trained(Protocol):
    """The handle on one model."""

    def residual(self) -> float:
        """How far the weights are from few bits, relative to their norm."""

    def quantised(self) -> AbstractContextManager[None]:
        """A block in which the model has its few bits."""

    def finish(self) -> nn.Module:
        """Give the model its few bits for good."""

    def pack(self) -> nn.Module:
        """A copy of the model that holds them packed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model and the optimiser."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, after model and optimiser have loaded theirs."""


class LowBitTraining(Spec):
    """Configuration; a frozen dataclass."""

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer) -> Trained:
        """Begin with a model and the optimiser that trains it, before they are distributed."""
