"""How long things live: what a forward keeps, hooks that take statistics, and what a session has learned."""

from __future__ import annotations

import gc

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
