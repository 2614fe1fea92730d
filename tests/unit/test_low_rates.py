"""Momentum before the exchange at a low learning rate, compared with momentum in the optimiser."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from benchmarks.common.small_net import sgd
from benchmarks.common.workers import Problem, train
from tests.unit.shared import for_each
from torch import Tensor, nn

RATE, STEPS = 0.08, 80  # a quarter of the rate at which dense training has the least loss after these steps


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def loss(model: nn.Module, x: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    return F.cross_entropy(model(x), y)


def score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int, float]:
    out = model(x)
    return int((out.argmax(1) == y).sum()), len(y), float(F.cross_entropy(out, y, reduction="sum"))


def images() -> dict[str, Tensor]:
    """Return noise, labelled by a random linear map."""
    rng = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(3000, 64, generator=rng), torch.randn(64, 10, generator=rng)
    y = (x @ teacher).argmax(1)
    return {"train_x": x[:2500], "train_y": y[:2500], "test_x": x[2500:], "test_y": y[2500:]}


def loss_after(spec: str) -> float:
    problem = Problem(net, 16, loss, score, sgd)
    return float(train(problem, spec, RATE, STEPS, 0, images())["test_loss"])


@for_each("spec", ["topk(density=0.02)", "deft(density=0.02)", "oktopk(density=0.02)", "cltk(density=0.02)"])
def test_sparse_methods_train_faster_at_a_low_rate_with_later_momentum_added_ahead(spec: str) -> None:
    """Faster than without, and than with momentum in the optimiser."""
    ahead = loss_after(spec)
    assert ahead <= 0.98 * loss_after(f"error_fed({spec}, ahead=0.0)")
    assert ahead <= 0.98 * loss_after(f"error_fed({spec}, momentum='optimizer')")


def test_sign_is_hardly_slower_at_a_low_rate_than_with_momentum_in_the_optimiser() -> None:
    assert loss_after("sign()") <= 1.1 * loss_after("error_fed(sign(), momentum='optimizer')")
