"""Rounds of federated training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.federated.client import Client
from laconic.federated.form import STATISTICS, Buffers, Tensors
from laconic.federated.message import NeedsWhole, Refused
from laconic.federated.samplings import Sampling
from laconic.federated.server import Server

Train = Callable[[int, Tensors, int], tuple[Tensors, int]]  # client, model, round -> model, examples
Proposals = Sequence[tuple[Tensors, int]]
Aggregate = Callable[[Tensors, Proposals], Tensors]


@dataclass(frozen=True)
class Outcome:
    """Result of one round. `down`, `up`: bytes of messages; `failed`: reasons by client."""

    number: int
    chosen: tuple[int, ...]
    down: int
    up: int
    model: Mapping[str, Tensor]
    failed: Mapping[int, str] = field(default_factory=dict)


def weighted_mean(model: Tensors, proposals: Proposals) -> Tensors:
    """Average the models, weighted by examples (FedAvg; McMahan et al. 2017, arXiv:1602.05629)."""
    return _mean(model, proposals, [float(examples) for _, examples in proposals])


def mean(model: Tensors, proposals: Proposals) -> Tensors:
    return _mean(model, proposals, [1.0] * len(proposals))


def majority(model: Tensors, proposals: Proposals) -> Tensors:
    """Apply signSGD with majority vote (Bernstein et al. 2018, arXiv:1810.05291), per tensor.

    The step is the sign of most clients times the median of the clients' mean magnitudes. BatchNorm
    statistics are averaged; integers are the first proposal's.
    """

    def voted(name: str, value: Tensor) -> Tensor:
        updates = torch.stack([tensors[name] - value for tensors, _ in proposals])
        sizes = updates.abs().reshape(len(proposals), -1).mean(1)
        return value + sizes.median() * updates.sign().sum(0).sign()

    def is_voted(name: str, value: Tensor) -> bool:
        return value.is_floating_point() and value.numel() > 0 and not name.endswith(STATISTICS)

    rest = mean({name: value for name, value in model.items() if not is_voted(name, value)}, proposals)
    return {name: rest[name] if name in rest else voted(name, value) for name, value in model.items()}


def _mean(model: Tensors, proposals: Proposals, weights: Sequence[float]) -> Tensors:
    total = sum(weights)
    if total <= 0:
        raise SpecError(f"the clients of a round have {total:g} examples in total: give each at least one")

    def averaged(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return proposals[0][0][name].clone()
        out = torch.zeros_like(value, dtype=torch.float64)
        for (tensors, _), weight in zip(proposals, weights, strict=True):
            out.add_(tensors[name], alpha=weight / total)
        return out.to(value.dtype)

    return {name: averaged(name, value) for name, value in model.items()}


def simulate(
    model: Tensors,
    train: Train,
    server: Server,
    *,
    clients: int,
    sampling: Sampling,
    rounds: int,
    aggregate: Aggregate = weighted_mean,
    buffers: Buffers = "send",
    shared_start: bool = False,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Train for `rounds` rounds and yield the result of each.

    Args:
        model: The first model, from which `server` was created.
        train: Trains a client's model and returns it with the number of examples; without examples no update
            is sent.
        server: Encodes the model and decodes the updates.
        clients: Number of clients.
        sampling: Chooses the clients of a round.
        rounds: Number of rounds.
        aggregate: Computes the next model.
        buffers, shared_start: As the server's.
        seed: Seed of the sampling.
    """
    arguments.whole("clients", clients, 1)
    arguments.whole("rounds", rounds, 1)
    there: dict[int, Client] = {}
    first = model
    for number in range(1, rounds + 1):
        before = (server.traffic.down_nbytes, server.traffic.up_nbytes)
        proposals, failed = [], {}
        chosen = sampling.chosen(number, clients, seed)
        for who in chosen:
            client = _client(there, who, first, buffers, shared_start)
            try:
                trained, examples = train(who, deliver(server, client, str(who)), number)
                if examples:
                    proposals.append((server.receive(str(who), client.reply(trained)), examples))
                else:
                    server.noted(str(who), client.acknowledge())
            except (Refused, ArithmeticError) as error:
                failed[who] = str(error)
        if proposals:
            model = aggregate(model, proposals)
        server.publish(model)
        after = (server.traffic.down_nbytes, server.traffic.up_nbytes)
        yield Outcome(number, tuple(chosen), after[0] - before[0], after[1] - before[1], model, failed)


def _client(
    there: dict[int, Client], who: int, first: Tensors, buffers: Buffers, shared_start: bool
) -> Client:
    if who not in there:
        there[who] = Client(first, buffers=buffers, shared_start=shared_start)
    return there[who]


def deliver(server: Server, client: Client, name: str) -> Tensors:
    try:
        return client.receive(server.message_for(name))
    except NeedsWhole:
        server.forget(name)
        return client.receive(server.message_for(name))
