"""Task: a data set, models for it, and training settings.

A data set is four tensors of bytes: `train_x train_y test_x test_y`. `inputs(x, rng)` converts a batch of x,
augmented if a generator is given. The loss is the cross-entropy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import SpecError
from laconic.data.partition import Partition
from laconic.exchange.method import Method
from laconic.strategies.strategy import Strategy

Tensors = dict[str, Tensor]
Inputs = Callable[[Tensor, torch.Generator | None], Tensor]
Kinds = Callable[[Tensor], Tensor]
PARTS = ("train_x", "train_y", "test_x", "test_y")


Cut = Callable[[nn.Module, int, int], nn.Module]


@dataclass(frozen=True)
class Recipe:
    """A model and its settings.

    `cut`: returns stage i of n, with the whole model's parameter names; raises `SpecError` for too many
    stages. `arranged`: converts the task's tensors.
    """

    build: Callable[[], nn.Module]
    lr: float
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    warmup: float = 0.05  # share of rising steps, before the cosine decay
    cut: Cut | None = None
    arranged: Callable[[Tensors], Tensors] | None = None

    def optimizer(
        self, model: nn.Module, lr: float | None = None, by: Method | Strategy | None = None
    ) -> torch.optim.Optimizer:
        """Return SGD with this recipe's settings, or the optimiser that the method needs.

        `lr`: peak rate; default: the recipe's or the optimiser's. `by`: a strategy with its own momentum gets
        SGD without.
        """
        for rule in by.rules if isinstance(by, Method) else ():
            made = rule.make([*model.parameters()], lr=lr, weight_decay=self.weight_decay)
            if made is not None:
                return made
        own = isinstance(by, Strategy) and by.owns_momentum
        return torch.optim.SGD(
            model.parameters(),
            lr=self.lr if lr is None else lr,
            momentum=0.0 if own else self.momentum,
            nesterov=not own and self.nesterov,
            weight_decay=self.weight_decay,
        )

    def rate(self, lr: float, step: int, steps: int) -> float:
        """Return a step's rate: a linear rise to `lr`, then a cosine decay to zero.

        >>> recipe = Recipe(nn.Identity, lr=0.1, warmup=0.5)
        >>> [round(recipe.rate(0.1, step, 4), 3) for step in range(4)]
        [0.05, 0.1, 0.1, 0.05]
        """
        rising = max(1, round(self.warmup * steps))
        if step < rising:
            return lr * (step + 1) / rising
        return lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def labels(y: Tensor) -> Tensor:
    return y


@dataclass(frozen=True)
class Task:
    """One built-in task. `batch`: examples per worker; `models`: recipes by name, the default first.

    `kinds` and `speakers` map train_y and train_x (n, ...) to integers (n,).
    """

    name: str
    title: str
    batch: int
    steps: int
    load: Callable[[Path | None], Tensors]
    inputs: Inputs
    models: Mapping[str, Recipe]
    files: tuple[str, ...] = ()  # one of these suffices
    how: str = ""  # how to get them
    kinds: Kinds = labels
    speakers: Kinds | None = None

    def kinds_for(self, partition: Partition, data: Tensors) -> Tensor:
        """Return each training example's label or speaker, integers (n,). Raises `SpecError` without any."""
        if partition.deals_by == "labels":
            return self.kinds(data["train_y"])
        if self.speakers is None:
            raise SpecError(
                f"{partition!r} divides by speaker, and {self.name} has no speakers: use the task"
                " shakespeare, or a partition by label such as label_shards()"
            )
        return self.speakers(data["train_x"])

    def recipe(self, model: str | None = None) -> Recipe:
        if model is None:
            return next(iter(self.models.values()))
        if model not in self.models:
            near = difflib.get_close_matches(model, self.models, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(self.models)}"
            raise SpecError(f"{self.name} has no model {model!r}: {hint}")
        return self.models[model]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy: logits (..., classes), integers y (...)."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten().long())


def right_answers(logits: Tensor, y: Tensor) -> int:
    return int((logits.argmax(-1) == y).sum())
