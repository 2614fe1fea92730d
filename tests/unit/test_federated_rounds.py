"""Rounds in one process, how updates become a model, and the shortest message of the server's cache."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.federated.cache import Cache
from laconic.federated.client import Client
from laconic.federated.message import Kind
from laconic.federated.rounds import deliver, majority, mean, simulate, weighted_mean
from laconic.federated.samplings.constant import Constant
from laconic.federated.samplings.falling import Falling
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


def test_a_zero_that_changes_its_sign_travels() -> None:
    first = {"w": torch.zeros(1000)}
    server, client = Server(first), Client(first)
    server.receive("a", client.reply(deliver(server, client, "a")))
    changed = first["w"].clone()
    changed[3], changed[5] = -0.0, 1.0
    server.publish({"w": changed})
    held = deliver(server, client, "a")["w"]
    assert torch.equal(held.view(torch.int32), changed.view(torch.int32))


def test_entries_serve_where_only_the_last_answer_is_kept() -> None:
    n = 10_000
    cache, model = Cache(n, most_nbytes=100), torch.zeros(n)
    for version in range(2, 8):
        changed = torch.zeros(n, dtype=torch.bool)
        changed[version] = True
        cache.add(version, torch.zeros(90, dtype=torch.uint8), changed)
    kinds = [cache.since(base, 7, model)[0] for base in (0, 3, 6, 7)]
    assert kinds == [Kind.WHOLE, Kind.ENTRIES, Kind.UPDATES, Kind.UPDATES]


def test_a_vote_is_no_single_clients() -> None:
    base = {"w": torch.zeros(4)}
    honest = [({"w": torch.tensor([0.1, -0.1, 0.1, -0.1])}, 1)] * 3
    hostile = [({"w": torch.tensor([-1e6, 1e6, -1e6, 1e6])}, 1)] * 2
    assert torch.equal(majority(base, honest + hostile)["w"], torch.tensor([0.1, -0.1, 0.1, -0.1]))


@settings(max_examples=50, deadline=None)
@given(
    share=st.floats(0.01, 1), rate=st.floats(0, 1), number=st.integers(1, 500), clients=st.integers(2, 300)
)
def test_falling_samples_fall_to_two(share: float, rate: float, number: int, clients: int) -> None:
    sampling = Falling(share, rate)
    now, later = (sampling.count(each, clients) for each in (number, number + 1))
    assert clients >= now >= later >= 2
    chosen = sampling.chosen(number, clients, 7)
    assert chosen == sampling.chosen(number, clients, 7) == sorted(set(chosen)) and len(chosen) == now
    assert laconic.parse(repr(sampling)) == sampling


def test_a_majority_does_not_vote_on_variances():
    model = {"bn.running_var": torch.ones(2), "bn.num_batches_tracked": torch.tensor(0), "w": torch.zeros(2)}
    proposal = {"bn.running_var": torch.tensor([4.0, 0.01]), "bn.num_batches_tracked": torch.tensor(3)}
    clients = [({**proposal, "w": torch.tensor(w)}, 1) for w in ([1.0, -1.0], [1.0, 1.0], [3.0, -1.0])]
    found = majority(model, clients)
    assert [*found] == [*model]
    assert torch.allclose(found["bn.running_var"], proposal["bn.running_var"])
    assert found["bn.num_batches_tracked"] == 3
    assert torch.equal(found["w"], torch.tensor([1.0, -1.0]))


def test_a_majority_votes_on_scalars():
    clients = [({"s": torch.tensor(s)}, 1) for s in (1.9, 1.8, 2.3)]
    assert torch.allclose(majority({"s": torch.tensor(2.0)}, clients)["s"], torch.tensor(1.8))
