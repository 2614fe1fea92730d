"""The gradient that SGD gets under local momentum: its own step then yields the wanted update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import over
from torch import nn
from torch.optim import SGD

from laconic.optim.hand_over import FOR_ADAM, HandOver, why_in_optimizer
from laconic.optim.lars import LARS

STEPS = 12
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"nesterov": True},
    {"maximize": True},
    {"weight_decay": 0.05},
    {"weight_decay": 0.05, "nesterov": True},
    {"weight_decay": 0.05, "nesterov": True, "maximize": True},
    {"weight_decay": 0.05, "foreach": False},
    {"weight_decay": 0.05, "fused": True},
    {"nesterov": True, "fused": True},
)


def gradient(step: int) -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(step))


def velocities(nesterov: bool, momentum: Any) -> list[torch.Tensor]:
    """The velocities that a rank would send, from the gradients."""
    u, sent = torch.zeros(7, 5), []
    for step in range(STEPS):
        g, m = gradient(step), momentum(step)
        u = m * (u + g) if nesterov else m * u + g
        sent.append(u + g if nesterov else u.clone())
    return sent


def ends(form: dict[str, Any], momentum: Any, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of SGD with its own momentum, and of SGD whose momentum was applied before."""
    first = torch.randn(7, 5, generator=torch.Generator().manual_seed(99))
    plain, handed = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    own, other = (SGD([each], lr=0.1, momentum=0.9, **form) for each in (plain, handed))
    hand_over, decay = HandOver(other), {}
    for step, x in enumerate(velocities(bool(form.get("nesterov")), momentum)):
        for each in (own, other):
            each.param_groups[0]["momentum"] = momentum(step)
        plain.grad, handed.grad = gradient(step), x * scale
        group = other.param_groups[0]
        changed, stepped = hand_over.prepare({"w": (handed, group)}, decay, scale)
        assert not stepped
        handed.grad = changed.get(handed, handed.grad) / scale
        own.step()
        other.step()
        hand_over.finish(keep=False)
        assert not other.state[handed]["momentum_buffer"].any()
    return plain.detach(), handed.detach()


@over(form=FORMS)
def test_the_step_is_that_of_sgd_with_momentum(form: dict[str, Any]) -> None:
    """Tolerance: float32 over 12 steps."""
    torch.testing.assert_close(*ends(form, lambda step: 0.9), rtol=1e-5, atol=1e-6)


@over(form=[form for form in FORMS if not form.get("nesterov")])
def test_a_schedule_of_the_momentum_is_followed(form: dict[str, Any]) -> None:
    """Of the heavy ball; with Nesterov's form the velocity u + g follows it one step later."""
    torch.testing.assert_close(*ends(form, lambda step: 0.5 + 0.04 * step), rtol=1e-5, atol=1e-6)


def test_a_scale_of_the_gradients_is_taken_into_account() -> None:
    for form in FORMS[3:6]:
        torch.testing.assert_close(*ends(form, lambda step: 0.9, 1024.0), rtol=1e-5, atol=1e-6)


def test_a_buffer_that_a_script_has_loaded_is_not_applied() -> None:
    """Also with dampening, and in the step after one with an empty buffer."""
    for form in ({}, {"dampening": 0.4}, {"nesterov": True}, {"weight_decay": 0.1}):
        weight = nn.Parameter(torch.zeros(7, 5))
        optimizer = SGD([weight], lr=1.0, momentum=0.9, **form)
        hand_over = HandOver(optimizer)
        optimizer.state[weight]["momentum_buffer"] = gradient(50)
        for step in range(3):
            if step == 2:
                optimizer.state[weight]["momentum_buffer"].copy_(gradient(51))
            before, x = weight.detach().clone(), gradient(step)
            decay: dict[str, torch.Tensor] = {}
            weight.grad = x.clone()
            changed, _ = hand_over.prepare({"w": (weight, optimizer.param_groups[0])}, decay)
            weight.grad = changed.get(weight, weight.grad)
            optimizer.step()
            hand_over.finish(keep=False)
            update = x + (0.1 * before if "weight_decay" in form else 0)
            torch.testing.assert_close(before - weight.detach(), update, rtol=1e-4, atol=1e-5)


def test_a_step_without_weight_decay_leaves_the_gradient_alone() -> None:
    weight = nn.Parameter(torch.zeros(7, 5))
    optimizer = SGD([weight], lr=1.0, momentum=0.9)
    hand_over = HandOver(optimizer)
    for step in range(3):
        weight.grad = gradient(step)
        assert hand_over.prepare({"w": (weight, optimizer.param_groups[0])}, {}) == ({}, [])
        optimizer.step()
        hand_over.finish(keep=False)


class Negated(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(SGD):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda ws: SGD(ws, lr=0.1, momentum=0.9), None),
        (lambda ws: SGD(ws, lr=0.1, momentum=0.9, fused=True), None),
        (lambda ws: Named(ws, lr=0.1, momentum=0.9), None),
        (lambda ws: LARS(ws), None),
        (lambda ws: SGD(ws, lr=0.1), ""),
        (lambda ws: SGD(ws, lr=0.1, momentum=0.9, dampening=0.1), "dampening is 0.1"),
        (lambda ws: Negated(ws, lr=0.1, momentum=0.9), "Negated has a step of its own"),
        (lambda ws: torch.optim.AdamW(ws), f"the optimiser is AdamW, not torch.optim.SGD{FOR_ADAM}"),
        (lambda ws: torch.optim.Adagrad(ws), "the optimiser is Adagrad, not torch.optim.SGD"),
    ],
)
def test_reasons_to_leave_momentum_in_the_optimiser(make: Any, reason: str | None) -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = make([weight])
    assert why_in_optimizer(optimizer, optimizer.param_groups[0], weight) == reason
