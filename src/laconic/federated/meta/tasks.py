"""Interface of the agents' tasks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Tasks(Protocol):
    """Agents with one task each. Examples are a pure function of the step."""

    @property
    def count(self) -> int:
        """Number of agents a."""

    def batch(self, step: int, size: int) -> Batch:
        """Return `size` examples per agent: inputs (a, size, in) and targets."""

    def episode(self, step: int, shots: int, queries: int) -> tuple[Batch, Batch]:
        """Return examples to learn from and others to test on."""
