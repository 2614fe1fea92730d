"""What a method needs to know of its agents' tasks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Tasks(Protocol):
    """Agents with a task each. What is drawn is a pure function of the step."""

    @property
    def count(self) -> int:
        """Number of agents a."""

    def batch(self, step: int, size: int) -> Batch:
        """`size` examples of each agent's task: inputs (a, size, in) and what belongs to them."""

    def episode(self, step: int, shots: int, queries: int) -> tuple[Batch, Batch]:
        """Examples to learn from and others to be tested on, of each agent's task."""
