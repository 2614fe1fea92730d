"""What a session has learned: saved and loaded, and refused where it belongs elsewhere."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from tests.unit.shared import for_each, refuses
from torch import nn

import laconic
from laconic.activations.session import Session
from laconic.core.errors import StateError


def net(wide: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 2))


def step(model: nn.Module, session: Session, seed: int) -> dict[str, float | None]:
    rng = torch.Generator().manual_seed(seed)
    model.zero_grad()
    with session:
        model(torch.randn(16, 4, generator=rng)).square().mean().backward()
    return session.bounds()


def learned() -> tuple[nn.Module, Session]:
    torch.manual_seed(0)
    model = net()
    session = laconic.activations.compress(model, "comet(every=1)")
    for seed in range(3):
        step(model, session, seed)
    return model, session


def test_a_session_goes_on_where_its_state_was_taken() -> None:
    model, session = learned()
    twin = copy.deepcopy(model)
    other = laconic.activations.compress(twin, "comet(every=1)")
    other.load_state_dict(copy.deepcopy(session.state_dict()))
    assert other.bounds() == session.bounds()
    assert [step(model, session, seed) for seed in range(3, 6)] == [
        step(twin, other, seed) for seed in range(3, 6)
    ]


def test_measuring_with_a_session_leaves_it_as_it_is() -> None:
    model, session = learned()
    before = session.state_dict()
    laconic.activations.measure(model, torch.ones(16, 4), session)
    assert session.state_dict() == before


def state_of(model: nn.Module) -> dict[str, Any]:
    return laconic.activations.compress(model).state_dict()


def without(name: str) -> dict[str, Any]:
    state = learned()[1].state_dict()
    del state["layers"]["2.weight"][name]
    return state


@for_each(
    "state, told",
    [
        ({}, r"this is not a state of activations: it has no 'key'.*: load the `state_dict\(\)` of"),
        (
            {"coding": "", "key": 1, "layers": [1, 2]},
            "'layers' are of type list, not a dict by parameter name",
        ),
        ({"coding": "", "key": "a", "layers": {}}, "its 'key' is 'a', not an integer"),
        ([], "it is of type list"),
        (state_of(nn.Linear(4, 2)), "another model: it has 'weight', 'bias'"),
        (state_of(net(16)), r"another model: '0.weight' is \(16, 4\) in the state and \(8, 4\) here"),
        (without("rms"), "damaged: '2.weight' has no 'rms'"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state: Any, told: str) -> None:
    _, session = learned()
    before = session.state_dict()
    refuses(StateError, told, session.load_state_dict, state)
    assert session.state_dict() == before


def test_a_state_is_plain_numbers() -> None:
    state = learned()[1].state_dict()
    assert set(state["layers"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for layer in state["layers"].values():
        assert all(isinstance(value, (int, float, tuple, type(None))) for value in layer.values())
    assert not math.isnan(state["layers"]["2.weight"]["mean_grad"])
