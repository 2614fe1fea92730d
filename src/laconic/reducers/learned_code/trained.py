"""Trained weights: one step of Adam (Kingma and Ba 2014, arXiv:1412.6980) per training step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.feedback.memory import Pending

LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
PARTS = ("weights", "first_moment", "second_moment", "steps")
Lesson = tuple[Tensor, int]  # gradient of a sum of losses, and the number of examples


class Trained:
    """Flat float32 weights, and Adam's moments. Equal lessons keep ranks equal up to rounding.

    A step's lessons are averaged; a skipped step teaches nothing.
    """

    def __init__(self, kind: str, weights: Tensor) -> None:
        self.kind = kind
        self.weights = weights
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._lessons: list[Lesson] = []
        self._pending: Pending[Lesson] = Pending(lambda lesson, layout: self._lessons.append(lesson))
        self._agreed = True
        self._own: Tensor | None = None  # weights before `agree`, during its step

    def begin(self, step: int) -> None:
        self._pending.finish_before(step)
        self._learn()

    def teach(self, lesson: Lesson, layout: Layout, step: int) -> None:
        self._pending.add(lesson, layout, step)

    def forget(self, layout: Layout) -> None:
        self._pending.drop(layout)
        if self._own is not None:
            self.weights, self._own, self._agreed = self._own, None, False

    def accept(self) -> None:
        self._own = None

    def may_differ(self) -> None:
        self._agreed = False

    def agree(self, comm: Comm, device: torch.device) -> None:
        """Copy rank 0's weights, once after `may_differ`, on all ranks: 4 bytes per weight."""
        if not self._agreed:
            self._own = self.weights
            self.weights = comm.broadcast(self.weights.to(device, copy=True), 0).cpu()
            self._agreed = True

    def _learn(self) -> None:
        if not self._lessons:
            return
        gradient = sum((each for each, _ in self._lessons), torch.zeros_like(self.weights))
        gradient /= sum(count for _, count in self._lessons)
        self._lessons.clear()
        self._steps += 1
        (b1, b2), t = BETAS, int(self._steps)
        self._first.mul_(b1).add_(gradient, alpha=1 - b1)
        self._second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        size = self._second.sqrt().div_(math.sqrt(1 - b2**t)).add_(EPS)
        self.weights = self.weights.addcdiv(self._first, size, value=-LR / (1 - b1**t))

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        self._learn()
        return {key: value.clone() for key, value in self._held().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for key, value in self._held().items():
            if key not in state or state[key].shape != value.shape:
                shape = tuple(state[key].shape) if key in state else None
                raise StateError(f"{key} has shape {shape} in the saved state, here {tuple(value.shape)}")
        self._pending.finish_all()
        self._lessons.clear()
        own = {key: state[key].to(value.dtype).clone() for key, value in self._held().items()}
        self.weights, self._first, self._second, self._steps = own.values()
        self._own = None
        self._agreed = False

    def _held(self) -> dict[str, Tensor]:
        held = (self.weights, self._first, self._second, self._steps)
        return {f"{self.kind}/{part}": value for part, value in zip(PARTS, held, strict=True)}
