"""MAML among agents, of second and first order (Finn et al. 2017, arXiv:1703.03400).

    every round:  g_i = d f_i(P - lr grad f_i(P; support); query) / dP    agent i, through `steps` inner steps
                  P = Adam(P, mean of C(g_i))                             the server

First order takes the query's gradient after the inner steps, without second derivatives. Without inner steps
it is joint training: one model for all tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.exchange import Exchange
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.tasks import Batch, Tasks
from laconic.federated.meta.trained import Trained, Work


@dataclass(frozen=True)
class MetaGradient:
    """Rounds of meta-gradients.

    Wire: per round and agent, one message of `up` (with error feedback if it is biased) and one of `down`.

    Args:
        rounds: Steps of the server's Adam.
        order: 2: MAML; 1: first-order MAML.
        inner_lr, inner_steps: Learning rate and steps of the agents' descent; 0 steps: joint training.
        outer_lr: Learning rate of Adam.
        shots, queries: Examples of the inner and the outer gradient.
    """

    rounds: int = 1000
    order: Literal[1, 2] = 2
    inner_lr: float = 0.01
    inner_steps: int = 1
    outer_lr: float = 1e-3
    shots: int = 10
    queries: int = 10
    up: Any = "dense()"
    down: Any = "dense()"

    def __post_init__(self) -> None:
        arguments.whole("rounds", self.rounds, 1)
        arguments.whole("order", self.order, 1, 2)
        arguments.number("inner_lr", self.inner_lr, above=0)
        arguments.whole("inner_steps", self.inner_steps)
        arguments.number("outer_lr", self.outer_lr, above=0)
        arguments.whole("shots", self.shots, 1)
        arguments.whole("queries", self.queries, 1)

    def train(self, learner: Learner, tasks: Tasks, first: Tensor, seed: int = 0) -> Trained:
        """Train the meta-model of these agents from common initial weights, float32 (n,)."""
        through = learner.meta_gradients if self.order == 2 else learner.first_order

        def gradients(start: Tensor, support: Batch, query: Batch) -> Tensor:
            return through(start, support, query, self.inner_steps, self.inner_lr)

        return descend(self, gradients, learner, tasks, first, seed)


class Plan(Protocol):
    """Numbers of the rounds of `descend`."""

    @property
    def rounds(self) -> int: ...
    @property
    def outer_lr(self) -> float: ...
    @property
    def shots(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def up(self) -> Any: ...
    @property
    def down(self) -> Any: ...


def descend(
    plan: Plan,
    gradients: Callable[[Tensor, Batch, Batch], Tensor],
    learner: Learner,
    tasks: Tasks,
    first: Tensor,
    seed: int,
) -> Trained:
    """Train by the server's Adam on the mean of `gradients(start, support, query)`, (a, n) from (a, n)."""
    work = Work()
    exchange = Exchange(learner.network.layout, first, tasks.count, plan.up, plan.down, seed)
    model = first.clone()
    adam = torch.optim.Adam([model], lr=plan.outer_lr)
    for k in range(plan.rounds):
        start = exchange.public.repeat(tasks.count, 1)
        support, query = tasks.episode(k, plan.shots, plan.queries)
        made = work.do("meta", lambda w=start, s=support, q=query: gradients(w, s, q))  # type: ignore[misc]
        model.grad = exchange.updates(made, k).mean(dim=0)
        adam.step()
        exchange.answer(model.detach(), k)
    agents = exchange.public.repeat(tasks.count, 1)
    return Trained(exchange.public, agents, plan.rounds, exchange.up_nbytes, exchange.down_nbytes, work.flops)
