"""How updates become a model, and who takes part."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.federated.rounds import majority
from laconic.federated.samplings.falling import Falling


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
