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
