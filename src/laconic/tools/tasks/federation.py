"""A task among clients with disjoint examples, in one process, with a real run's messages.

Local training depends only on (seed, client, round), so all methods have the same batches and first model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.core.turn import mix
from laconic.data.partition import Deal, Partition
from laconic.federated.form import Tensors as Model
from laconic.federated.rounds import Outcome, simulate
from laconic.federated.samplings import LEAST
from laconic.federated.samplings.constant import Constant
from laconic.federated.schemes import Scheme, scheme_of
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Task, Tensors, cross_entropy


@dataclass(frozen=True)
class Federation:
    """Settings of one training. `by`: a partition; `eval_every`: rounds between tests."""

    task: str
    model: str | None
    spec: str
    by: str
    clients: int
    per_round: int
    rounds: int
    local_steps: int
    batch: int
    lr: float
    momentum: float
    seed: int
    eval_every: int

    def __post_init__(self) -> None:
        for name in ("clients", "per_round", "rounds", "local_steps", "batch", "eval_every"):
            arguments.whole(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        hint = "no more than --clients, and not one alone, whose update the next model would show"
        arguments.whole("--per-round", self.per_round, min(LEAST, self.clients), self.clients, hint)
        arguments.number("--lr", self.lr, above=0)
        arguments.number("--momentum", self.momentum, least=0, below=1)


def partition_of(text: str) -> Partition:
    made = parse(text)
    if not isinstance(made, Partition):
        raise SpecError(
            f"{arguments.shown(text)} is not a partition: give one such as iid(), dirichlet(0.1) or"
            " classes_per_client(2)"
        )
    return made


def deal(settings: Federation, tensors: Tensors) -> Deal:
    partition = partition_of(settings.by)
    return partition.over(find(settings.task).kinds_for(partition, tensors), settings.clients, settings.seed)


def federate(settings: Federation, tensors: Tensors) -> Iterator[dict[str, Any]]:
    """Train, and yield each round's {"round", "chosen", "down", "up", "failed"}.

    "accuracy" and "test_loss" are added every `eval_every` rounds and after the last.
    """
    task, shares = find(settings.task), deal(settings, tensors)
    torch.manual_seed(settings.seed)
    net = task.recipe(settings.model).build()
    scheme = scheme_of(settings.spec).attached(net)
    start: Model = {name: value.detach().clone() for name, value in net.state_dict().items()}
    rounds = simulate(
        start,
        lambda client, model, number: local_training(
            settings, task, tensors, net, shares, scheme, client, model, number
        ),
        scheme.server(start, seed=settings.seed, shared_start=True),
        clients=settings.clients,
        sampling=scheme.sampling or Constant(settings.per_round / settings.clients),
        rounds=settings.rounds,
        aggregate=scheme.aggregate,
        shared_start=True,
        seed=settings.seed,
    )
    for outcome in rounds:
        yield told_of(settings, task, tensors, net, outcome)


def local_training(
    settings: Federation,
    task: Task,
    tensors: Tensors,
    net: nn.Module,
    shares: Deal,
    scheme: Scheme,
    client: int,
    model: Model,
    number: int,
) -> tuple[Model, int]:
    """Train one client for one round, in `net`, and return the model and its number of examples.

    Batches continue over rounds.
    """
    own = shares.indices(client)
    if not len(own):
        return model, 0
    batch = min(settings.batch, len(own))
    order = Shard(len(own), batch, 0, 1, mix(settings.seed, client))
    net.load_state_dict(model)
    net.train()
    scheme.begin()
    optimizer = torch.optim.SGD(net.parameters(), lr=settings.lr, momentum=settings.momentum)
    first = (number - 1) * settings.local_steps
    for step in range(first, first + settings.local_steps):
        chosen = own[order.indices(step)]
        optimizer.zero_grad()
        logits = net(task.inputs(tensors["train_x"][chosen], order.rng(step)))
        loss = cross_entropy(logits, tensors["train_y"][chosen])
        torch.autograd.backward(loss)
        optimizer.step()
    trained = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return scheme.shared(model, trained), len(own)


def told_of(
    settings: Federation, task: Task, tensors: Tensors, net: nn.Module, outcome: Outcome
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "round": outcome.number,
        "chosen": list(outcome.chosen),
        "down": outcome.down,
        "up": outcome.up,
        "failed": {str(who): why for who, why in outcome.failed.items()},
    }
    if outcome.number % settings.eval_every == 0 or outcome.number == settings.rounds:
        net.load_state_dict(dict(outcome.model))
        tested = evaluate(net, task, tensors, 0, 1)
        event["accuracy"] = tested["right"] / tested["answers"]
        event["test_loss"] = tested["loss_sum"] / tested["answers"]
    return event
