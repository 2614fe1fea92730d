"""Descent along mean meta-gradients, by the server's Adam."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.exchange import Exchange
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.tasks import Batch, Tasks
from laconic.federated.meta.trained import Trained, Work


@dataclass(frozen=True, kw_only=True)
class Descent(ABC):
    """Rounds in which each agent sends a meta-gradient.

    Wire: per round and agent, one message of `up` (with error feedback if biased) and one of `down`.

    Args:
        rounds: Steps of the server's Adam.
        inner_lr, inner_steps: Of the agents; 0 steps: joint training.
        outer_lr: Learning rate of Adam.
        shots, queries: Examples per task or class, of the inner and the outer gradient.
        up, down: Specs or codecs. Lossy ones encode the difference to the other side's copy.

    Raises:
        SpecError: A number is out of range.
    """

    rounds: int = 1000
    inner_lr: float = 0.01
    inner_steps: int = 1
    outer_lr: float = 1e-3
    shots: int = 10
    queries: int = 10
    up: Any = "dense()"
    down: Any = "dense()"

    def __post_init__(self) -> None:
        arguments.whole("rounds", self.rounds, 1)
        arguments.number("inner_lr", self.inner_lr, above=0)
        arguments.whole("inner_steps", self.inner_steps)
        arguments.number("outer_lr", self.outer_lr, above=0)
        arguments.whole("shots", self.shots, 1)
        arguments.whole("queries", self.queries, 1)

    @abstractmethod
    def gradients(self, learner: Learner, start: Tensor, support: Batch, query: Batch) -> Tensor:
        """Return meta-gradients (a, n). `start` (a, n): the common weights in each row."""

    def train(self, learner: Learner, tasks: Tasks, first: Tensor, seed: int = 0) -> Trained:
        """Train from common weights, float32 (n,)."""
        work = Work()
        exchange = Exchange(learner.network.layout, first, tasks.count, self.up, self.down, seed)
        model = first.clone()
        adam = torch.optim.Adam([model], lr=self.outer_lr)
        for k in range(self.rounds):
            start = exchange.public.repeat(tasks.count, 1)
            support, query = tasks.episode(k, self.shots, self.queries)
            made = work.do("meta", lambda w=start, s=support, q=query: self.gradients(learner, w, s, q))  # type: ignore[misc]
            model.grad = exchange.updates(made, k).mean(dim=0)
            adam.step()
            exchange.answer(model.detach(), k)
        agents = exchange.public.repeat(tasks.count, 1)
        return Trained(
            exchange.public, agents, self.rounds, exchange.up_nbytes, exchange.down_nbytes, work.flops
        )
