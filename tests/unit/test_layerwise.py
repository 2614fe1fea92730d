"""LARS and LAMB against a maintained implementation, literal loops over numbers, and their own laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.shared import for_each, refuses, resumed, same
from torch import Tensor, nn
from torch.nn import Parameter

from laconic.core.errors import AttachError, SpecError
from laconic.optim import LAMB, LARS

STEPS, SHAPES = 20, ((4, 3), (2, 5, 3), (6,), (1,), (7, 1))


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Parameter]:
    rng = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in shapes]


def gradients(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[list[Tensor]]:
    rng = torch.Generator().manual_seed(2)
    return [[torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes] for _ in range(STEPS)]


def run(optimiser: torch.optim.Optimizer, ws: list[Parameter], rates: list[float] | None = None) -> None:
    for step, gs in enumerate(gradients(tuple(tuple(w.shape) for w in ws))):
        for w, g in zip(ws, gs, strict=True):
            w.grad = g.clone()
        if rates is not None:
            optimiser.param_groups[0]["lr"] = rates[step]
        optimiser.step()


RATES = [0.5 * (1 - step / STEPS) for step in range(STEPS)]


@for_each("nesterov", [False, True])
def test_lars_is_the_maintained_one_on_twenty_steps(nesterov: bool) -> None:
    theirs = pytest.importorskip("pytorch_optimizer", reason="pip install 'laconic[test]' has it").LARS
    settings: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    ours, other = parameters(), parameters()
    run(LARS(ours, trust=0.02, **settings), ours, RATES)
    run(theirs(other, trust_coefficient=0.02, **settings), other, RATES)
    torch.testing.assert_close([*ours], [*other], rtol=1e-12, atol=1e-12)


@for_each("most", [10.0, 0.5])
def test_lamb_is_the_maintained_one_on_twenty_steps(most: float) -> None:
    """Their ratio has eps beside |u|, and all tensors have one: so matrices, and 1e-6 of the way."""
    theirs = pytest.importorskip("pytorch_optimizer", reason="pip install 'laconic[test]' has it").Lamb
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    shapes = ((4, 3), (2, 5, 3), (7, 1))
    ours, other = parameters(shapes), parameters(shapes)
    run(LAMB(ours, bias_correction=False, most=most, **settings), ours)
    clamped = type("Clamped", (theirs,), {"clamp": most})
    as_published: dict[str, Any] = {"weight_decouple": False, "adam_debias": True}  # no factor on the rate
    run(clamped(other, **as_published, **settings), other)
    torch.testing.assert_close([*ours], [*other], rtol=0, atol=2e-6)


def test_lamb_is_algorithm_2_of_the_paper() -> None:
    """A literal loop over NumPy arrays, with bias correction; vectors take Adam's step."""
    ws = parameters()
    expected = [w.detach().numpy().copy() for w in ws]
    ms, vs = ([np.zeros_like(w) for w in expected] for _ in range(2))
    for t, gs in enumerate(gradients(), 1):
        for i, g in enumerate(each.numpy() for each in gs):
            ms[i] = 0.8 * ms[i] + 0.2 * g
            vs[i] = 0.95 * vs[i] + 0.05 * g**2
            u = ms[i] / (1 - 0.8**t) / (np.sqrt(vs[i] / (1 - 0.95**t)) + 1e-3)
            if expected[i].ndim > 1:
                u = u + 0.1 * expected[i]
                u = u * np.linalg.norm(expected[i]) / np.linalg.norm(u)
            expected[i] = expected[i] - 0.02 * u
    run(LAMB(ws, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1), ws)
    for w, right in zip(ws, expected, strict=True):
        np.testing.assert_allclose(w.detach().numpy(), right, rtol=1e-12, atol=1e-12)


@for_each("make", [LARS, LAMB])
def test_a_resumed_optimiser_takes_the_same_bits(make: Any) -> None:
    x = torch.randn(2 * STEPS, 8, 6, generator=torch.Generator().manual_seed(0))

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        return net, make(net.parameters(), lr=0.1, weight_decay=0.01)

    def train(parts: Any, steps: range) -> None:
        for step in steps:
            parts[1].zero_grad()
            parts[0](x[step]).square().mean().backward()
            parts[1].step()

    (net, _), (other, _) = resumed(start, train, STEPS, 2 * STEPS)
    assert same(net.parameters(), other.parameters())


@for_each("make", [LARS, LAMB])
def test_the_length_of_the_gradient_does_not_matter(make: Any) -> None:
    """That is what a trust ratio is for; without decay, and for matrices alone."""
    found = []
    for gain in (1.0, 1000.0):
        w = Parameter(torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3))
        optimiser = make([w], lr=0.1, weight_decay=0.0)
        w.grad = gain * torch.tensor([[1.0, -2.0, 0.5], [0.1, 1.0, 3.0]], dtype=torch.float64)
        optimiser.step()
        found.append(w.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


@for_each("make", [LARS, LAMB])
def test_vectors_are_excluded_unless_the_group_says_otherwise(make: Any) -> None:
    def moved(**settings: Any) -> float:
        w = Parameter(torch.tensor([3.0, 4.0]))
        w.grad = torch.zeros(2)
        make([{"params": [w], **settings}], lr=0.1, weight_decay=0.1).step()
        return float((w.detach() - torch.tensor([3.0, 4.0])).norm())

    assert moved() == 0  # no decay
    assert moved(least_dim=1) > 0


@for_each("make", [LARS, LAMB])
def test_weights_that_are_zero_move_and_zero_gradients_do_not_divide(make: Any) -> None:
    zero, still = Parameter(torch.zeros(2, 2)), Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    make([zero, still], lr=0.1, weight_decay=0.0).step()
    assert (zero < 0).all()
    assert torch.equal(still, torch.ones(2, 2))


def test_a_complex_matrix_is_its_pairs_of_reals() -> None:
    for make in (LARS, LAMB):
        whole = Parameter(torch.tensor([[1 + 2j, 3 - 1j]]))
        pairs = Parameter(torch.view_as_real(whole.detach()).clone())
        whole.grad = torch.tensor([[0.5 - 1j, 2j]])
        pairs.grad = torch.view_as_real(whole.grad).clone()
        for w in (whole, pairs):
            make([w], lr=0.1).step()
        torch.testing.assert_close(torch.view_as_real(whole.detach()), pairs.detach())


@for_each(
    "make, settings, says",
    [
        (LARS, {"lr": -1.0}, "lr must be"),
        (LARS, {"trust": 0}, "trust must be"),
        (LARS, {"momentum": 1.0}, "momentum must be"),
        (LARS, {"least_dim": -1}, "least_dim must be"),
        (LAMB, {"betas": (0.9, 1.0)}, "betas"),
        (LAMB, {"most": 0.0}, "most must be"),
        (LAMB, {"eps": 0.0}, "eps must be"),
    ],
)
def test_a_wrong_setting_is_refused(make: Any, settings: dict[str, Any], says: str) -> None:
    refuses(SpecError, says, lambda: make([Parameter(torch.zeros(2))], **settings))


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    refuses(AttachError, "sparse=True", lambda: LARS(table.parameters()).step())


def test_a_tensor_that_joins_later_is_updated_as_if_it_were_alone() -> None:
    """Its bias correction counts its own steps; weight decay makes the length of a step matter."""
    gs = gradients()
    for make, settings in ((LARS, {}), (LAMB, {"lr": 0.1})):
        ws, alone = parameters(), parameters()
        together = make(ws, weight_decay=0.1, **settings)
        apart = [make([w], weight_decay=0.1, **settings) for w in alone]
        for step in range(4):
            for number, (w, g) in enumerate(zip(ws, gs[step], strict=True)):
                w.grad = g.clone() if step >= number else None
            together.step()
        for number, (w, optimiser) in enumerate(zip(alone, apart, strict=True)):
            for step in range(number, 4):
                w.grad = gs[step][number].clone()
                optimiser.step()
        for number, (w, other) in enumerate(zip(ws, alone, strict=True)):
            torch.testing.assert_close(w, other, rtol=1e-12, atol=1e-12, msg=f"{make.__name__}, {number}")
