"""Rates for large batches, the recipe, and gradient accumulation against the whole batch."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laconic.core.errors import AttachError, SpecError
from laconic.optim.schedule import WarmUpThenDecay, rate_factor
from laconic.recipes import Accumulation, large_batch


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def test_the_rate_rises_from_the_small_batchs_to_the_scaled_one_and_falls_to_zero() -> None:
    for kind, scale in (("lamb", 4.0), ("lars", 16.0), ("sgd", 16.0)):
        optimizer, schedule = large_batch(
            net(),
            batch=1024,
            base_batch=64,
            steps=40,
            optimizer=kind,  # type: ignore[arg-type]
            lr=0.01,
            warmup_steps=8,
        )
        rates = []
        for _ in range(41):
            rates.append(optimizer.param_groups[-1]["lr"])
            optimizer.step()
            schedule.step()
        assert max(rates) == pytest.approx(0.01 * scale)
        assert rates.index(max(rates)) == 7  # the last of the rise
        steps = [after - before for before, after in pairwise(rates[:8])]
        assert steps == pytest.approx([0.01 * (scale - 1) / 8] * 7)  # from 0.01 in equal steps
        assert rates[0] == pytest.approx(0.01 + steps[0])
        assert all(after < before for before, after in pairwise(rates[8:]))
        assert rates[40] == 0


def test_the_base_batch_takes_the_base_rate_at_once() -> None:
    optimizer, _ = large_batch(net(), batch=64, base_batch=64, steps=10, lr=0.3)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_smaller_batch_takes_a_smaller_rate() -> None:
    assert rate_factor(16, 64) == 0.25
    optimizer, _ = large_batch(net(), batch=16, base_batch=64, steps=10, optimizer="sgd", lr=0.4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_vectors_have_no_weight_decay_in_any_recipe() -> None:
    for kind in ("lamb", "lars", "sgd"):
        model = net()
        optimizer, _ = large_batch(
            model,
            batch=64,
            base_batch=64,
            steps=9,
            optimizer=kind,  # type: ignore[arg-type]
            weight_decay=0.5,
        )
        before = copy.deepcopy(model)
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()
        for each, was in zip(model.parameters(), before.parameters(), strict=True):
            assert torch.equal(each, was) == (each.dim() == 1)


def test_optimiser_and_schedule_resume_with_the_same_bits() -> None:
    def made() -> tuple[nn.Module, Any, Any]:
        model = net()
        return (model, *large_batch(model, batch=512, base_batch=64, steps=20))

    def train(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
        for step in steps:
            rng = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(9, 6, generator=rng)).square().mean().backward()
            optimizer.step()
            schedule.step()

    whole = made()
    train(*whole, range(20))
    first = made()
    train(*first, range(7))
    again = made()
    for part, other in zip(first, again, strict=True):
        other.load_state_dict(copy.deepcopy(part.state_dict()))
    train(*again, range(7, 20))
    for w, v in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(w, v)


@pytest.mark.parametrize(("batch", "most"), [(12, 12), (12, 5), (12, 1), (7, 3)])
def test_accumulated_parts_are_the_whole_batch(batch: int, most: int) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(batch, 6, dtype=torch.float64), torch.randint(3, (batch,))
    whole, parted = net().double(), net().double()
    F.cross_entropy(whole(x), y).backward()
    accumulation = Accumulation(batch, most=most, ranks=1)
    assert max(accumulation.sizes) <= most
    assert sum(accumulation.sizes) == batch
    for share, rows, labels in accumulation.parts(parted, x, y):
        (share * F.cross_entropy(parted(rows), labels)).backward()
    for w, v in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(w.grad, v.grad, rtol=1e-12, atol=1e-12)


def test_a_batch_that_does_not_divide_is_refused_with_its_neighbours() -> None:
    with pytest.raises(SpecError, match=r"multiple of the 3 ranks.*got 100: take 99 or 102"):
        Accumulation(100, ranks=3)
    with pytest.raises(SpecError, match="got 2: take 3"):
        Accumulation(2, ranks=3)
    with pytest.raises(SpecError, match=r"is 4 examples, got 3.*drop_last=True"):
        next(Accumulation(8, ranks=2).parts(net(), torch.zeros(3, 6)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 0}, "batch must be"),
        ({"base_batch": 1.5}, "base_batch must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": "500", "batch": 128}, "steps must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"warmup_steps": 10}, "warmup_steps must be below steps=10"),
        ({"optimizer": "adam"}, "'lamb', 'lars' or 'sgd'"),
        ({"scaling": "cube"}, "scaling must be"),
        ({"lr": 0}, "lr must be"),
        ({"power": 0}, "power must be"),
    ],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        large_batch(net(), **{"batch": 64, "base_batch": 64, "steps": 10, **wrong})


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(AttachError, match="no parameter"):
        large_batch(nn.ReLU(), batch=64, base_batch=64, steps=10)


def test_after_the_last_step_the_rate_stays_at_its_end() -> None:
    assert WarmUpThenDecay(steps=4, end=0.25)(100) == 0.25
