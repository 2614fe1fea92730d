"""The quantiser of the sparse-model methods: what it keeps, what it loses, and that models stay sparse."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import refuses
from torch import Tensor

from laconic.core.errors import NonFiniteError, WireError
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.feedback.no_feedback import NoFeedback
from laconic.optim import QCMDAdaGrad

N = 20_000


def through(spec: str, x: Tensor, key: int = 0) -> Tensor:
    codec = parse(spec)
    return codec.decode(codec.encode(x, key), x.numel())


def test_what_is_kept_becomes_its_mean_and_the_rest_zero() -> None:
    """It loses far less than rounding at random, and nothing of a constant tensor."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    kept = x.abs() >= 0.7 * x.abs().mean()
    mean = x[kept].abs().double().mean().float()
    assert torch.equal(through("threshold_ternary()", x), torch.where(kept, x.sign() * mean, 0.0))
    lost = {
        spec: float((through(spec, x) - x).square().sum() / x.square().sum())
        for spec in ("threshold_ternary()", "cutoff()", "ternary()")
    }
    assert lost["threshold_ternary()"] == pytest.approx(0.19, abs=0.01)
    assert lost["threshold_ternary()"] < min(lost["cutoff()"], lost["ternary()"]) / 5
    for value in (0.1, -1 / 3, 3e38):
        x = torch.full((1001,), value)
        assert torch.equal(through("threshold_ternary(share=1.0)", x), x)


def test_nan_and_damage_are_refused() -> None:
    codec = parse("threshold_ternary()")
    refuses(NonFiniteError, "skip such a step", codec.encode, torch.tensor([1.0, torch.nan]))
    wire = codec.encode(torch.ones(5))
    for mean in (-1.0, torch.inf, torch.nan):
        wire[:4] = torch.tensor([mean]).view(torch.uint8)
        refuses(WireError, "negative or not finite", codec.decode, wire, 5)
    for method in ("qcmd_adagrad()", "qrda_adagrad()"):  # which take it without feedback
        first = lift(method).routes[0]
        assert "threshold_ternary()" in repr(first.reducer) and isinstance(first.feedback, NoFeedback)


def zeros_after_training(spec: str, seed: int) -> float:
    """Share of zero weights of a logistic model, of which 20 of 200 weights matter, on four workers."""
    rng = torch.Generator().manual_seed(seed)
    true, weights = torch.zeros(200), torch.zeros(200, requires_grad=True)
    true[:20] = 2 * torch.randn(20, generator=rng)
    optimizer = QCMDAdaGrad([weights], lr=0.1, l1=0.01)
    for step in range(60):
        weights.grad = torch.zeros(200)
        for rank in range(4):
            x = torch.randn(32, 200, generator=rng)
            y = (torch.rand(32, generator=rng) < torch.sigmoid(x @ true)).float()
            gradient = x.T @ (torch.sigmoid(x @ weights.detach()) - y) / 32
            weights.grad += through(spec, gradient, 4 * step + rank) / 4
        optimizer.step()
    return optimizer.zero_share()


def test_models_end_at_least_as_sparse_as_with_exact_gradients() -> None:
    """Over two seeds; `cutoff()` leaves far fewer zeros."""
    zeros = {
        spec: sum(zeros_after_training(spec, seed) for seed in range(2)) / 2
        for spec in ("dense()", "threshold_ternary()", "cutoff()")
    }
    assert zeros["threshold_ternary()"] >= zeros["dense()"]
    assert zeros["threshold_ternary()"] > 1.2 * zeros["cutoff()"]
