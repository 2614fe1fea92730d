"""How long things live: what a forward keeps, hooks that take statistics, and what a session has learned."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations.ledger import Watch


@pytest.mark.parametrize("function", [nn.Tanh, nn.Sigmoid, nn.Softmax, nn.ReLU])
def test_a_forward_without_a_backward_leaves_nothing(function: type[nn.Module]) -> None:
    """Softmax, tanh and sigmoid save their own output: kept with its graph, it would hold itself for ever."""
    act = function(dim=-1) if function is nn.Softmax else function()
    model, outputs = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 4)), []
    act.register_forward_hook(lambda module, given, out: outputs.append(Watch(out.untyped_storage())))
    for _ in range(3):
        with laconic.activations.compress(model):
            out = model(torch.ones(4, 8))
        del out
    gc.collect()
    assert [watch.expired() for watch in outputs] == [True] * 3


@pytest.mark.parametrize("function", [torch.tanh, torch.exp, nn.functional.relu])
def test_a_change_in_place_of_what_backward_needs_is_refused(function: object) -> None:
    """As torch refuses it without hooks."""
    model = nn.Linear(4, 4)
    with laconic.activations.compress(model):
        out = function(model(torch.ones(3, 4)))  # type: ignore[operator]
        out.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_gradients_of_gradients_pass_through_what_stays_exact() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3, 4, requires_grad=True)

    def twice() -> Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    dense = twice()
    with laconic.activations.compress(model):
        assert torch.equal(twice(), dense)


def trained(how: str) -> list[float | None]:
    """The bound of the last layer after each of six steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session, bounds = laconic.activations.compress(model, "comet(every=1)", optimizer), []

    def step(forward: AbstractContextManager[object], around: AbstractContextManager[object]) -> None:
        with around:
            with forward:
                loss = model(torch.randn(64, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bounds.append(session.bounds()["2"])

    with session if how == "one block" else nullcontext():
        for _ in range(6):
            step(
                session if how == "a block a forward" else nullcontext(),
                session if how == "a block a step" else nullcontext(),
            )
    return bounds


@pytest.mark.parametrize("how", ["a block a step", "a block a forward"])
def test_bounds_follow_the_gradients_however_a_session_is_opened(how: str) -> None:
    bounds = trained("one block")
    assert None not in bounds[1:] and len(set(bounds)) == 6
    assert trained(how) == bounds


def test_statistics_leave_no_hook_on_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with laconic.activations.compress(model) as session:
        loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    assert len(session.bounds()) == 2
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())
