"""Local training of each agent on its own task."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.learner import Learner, clipped
from laconic.federated.meta.tasks import Tasks
from laconic.federated.meta.trained import Work


@dataclass(frozen=True)
class Local:
    """Steps of SGD with momentum, m = momentum m + clip(g), w -= lr m, from m = 0.

    batch: examples per step. clip: largest norm of a gradient.
    """

    steps: int = 1000
    lr: float = 0.01
    momentum: float = 0.9
    batch: int = 10
    clip: float | None = 10.0

    def __post_init__(self) -> None:
        arguments.whole("steps", self.steps, 1)
        arguments.whole("batch", self.batch, 1)
        arguments.number("lr", self.lr, above=0)
        arguments.number("momentum", self.momentum, least=0, below=1)
        if self.clip is not None:
            arguments.number("clip", self.clip, above=0)

    def train(self, learner: Learner, tasks: Tasks, weights: Tensor, work: Work, begin: int = 0) -> Tensor:
        """Train weights (a, n) on the batches from step `begin`."""
        speed = weights.new_zeros(weights.shape)
        for step in range(begin, begin + self.steps):
            x, y = tasks.batch(step, self.batch)
            gradients = work.do("local", lambda w=weights, x=x, y=y: learner.gradients(w, x, y))  # type: ignore[misc]
            speed = self.momentum * speed + clipped(gradients, self.clip)
            weights = weights - self.lr * speed
        return weights
