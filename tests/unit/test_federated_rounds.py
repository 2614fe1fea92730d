"""Rounds in one process: who has nothing to teach."""

from __future__ import annotations

import torch

from laconic.federated.rounds import mean, simulate, weighted_mean
from laconic.federated.samplings.constant import Constant
from laconic.federated.server import Server

from .federated_world import equal, model, train

SPEC = "stc(density=0.05)"


def idle(client: int, tensors: dict[str, torch.Tensor], number: int) -> tuple[dict[str, torch.Tensor], int]:
    """Clients 0 and 1 have no examples; in the second round nobody has."""
    return (tensors, 0) if client < 2 or number == 2 else train(client, tensors, number)


def test_a_round_without_examples_leaves_the_model() -> None:
    first = model()
    server = Server(first, SPEC)
    sampling = Constant(1.0)
    rounds = simulate(first, idle, server, clients=4, sampling=sampling, rounds=3, aggregate=weighted_mean)
    models = [outcome.model for outcome in rounds]
    assert equal(dict(models[0]), dict(models[1])) and not equal(dict(models[1]), dict(models[2]))


def test_who_has_no_examples_does_not_count_in_a_mean_of_clients() -> None:
    first = model()
    with_idle, without = (Server(first) for _ in range(2))
    rounds = simulate(first, idle, with_idle, clients=3, sampling=Constant(1.0), rounds=1, aggregate=mean)
    outcome = next(rounds)
    trained, _ = train(2, without.public, 1)
    assert all(torch.allclose(outcome.model[name], trained[name], atol=1e-5) for name in first)
    assert not outcome.failed and [with_idle.holds(str(client)) for client in range(3)] == [1, 1, 1]
