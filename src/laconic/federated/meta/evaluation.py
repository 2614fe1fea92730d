"""Few-step evaluation of a meta-model on new tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.tasks import Tasks

STEPS = (0, 1, 5, 10)


@dataclass(frozen=True)
class FewStep:
    """Mean loss over tasks and accuracy (None for a regression) after `steps` steps."""

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    accuracy: tuple[float, ...] | None


def few_step(
    learner: Learner,
    tasks: Tasks,
    weights: Tensor,
    *,
    shots: int = 10,
    queries: int = 100,
    lr: float = 0.01,
    steps: Sequence[int] = STEPS,
) -> FewStep:
    """Descend on `shots` examples of each new task, and test on `queries` others.

    Args:
        weights: The meta-model, float32 (n,).
        shots, queries: Examples per task or class.
    """
    arguments.number("lr", lr, above=0)
    if not steps or min(steps) < 0:
        raise SpecError(f"steps must be integers of at least 0, got {tuple(steps)}")
    support, (x, y) = tasks.episode(0, shots, queries)
    at = weights.repeat(tasks.count, 1)
    losses, rights = {}, {}
    for step in range(max(steps) + 1):
        with torch.no_grad():
            outputs = learner.network(at, x)
            losses[step] = float(learner.loss(outputs, y).mean())
            if not y.is_floating_point():
                rights[step] = float((outputs.argmax(dim=2) == y).float().mean())
        at = at - lr * learner.gradients(at, *support)
    asked = tuple(steps)
    accuracy = tuple(rights[step] for step in asked) if rights else None
    return FewStep(asked, tuple(losses[step] for step in asked), accuracy)
