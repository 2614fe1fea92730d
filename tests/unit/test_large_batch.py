"""Rates for large batches, the recipe, and gradient accumulation against the whole batch."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.large_batch.__main__ import BASE, EXAMPLES, drawn, trials
from benchmarks.large_batch.page import copies_of, large_of, noise_scale
from benchmarks.pages.write import ROOT
from tests.unit.shared import for_each, refuses, resumed, same
from torch import nn

from laconic.core.errors import AttachError, SpecError
from laconic.optim.schedule import WarmUpThenDecay, rate_factor
from laconic.recipes import Accumulation, large_batch


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def test_the_rate_rises_from_the_small_batchs_to_the_scaled_one_and_falls_to_zero() -> None:
    for kind, scale in (("lamb", 4.0), ("lars", 16.0), ("sgd", 16.0)):
        scaled: Any = {"batch": 1024, "base_batch": 64, "steps": 40, "lr": 0.01, "warmup_steps": 8}
        optimizer, schedule = large_batch(net(), optimizer=kind, **scaled)
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
        decay: Any = {"optimizer": kind, "weight_decay": 0.5}
        optimizer, _ = large_batch(model, batch=64, base_batch=64, steps=9, **decay)
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

    def train(parts: Any, steps: range) -> None:
        model, optimizer, schedule = parts
        for step in steps:
            rng = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(9, 6, generator=rng)).square().mean().backward()
            optimizer.step()
            schedule.step()

    whole, again = resumed(made, train, 7, 20)
    assert same(whole[0].parameters(), again[0].parameters())


@for_each("batch, most", [(12, 12), (12, 5), (12, 1), (7, 3)])
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
    refuses(
        SpecError, r"multiple of the number of ranks, 3, got 100: use 99 or 102", Accumulation, 100, ranks=3
    )
    refuses(SpecError, "got 2: use 3", Accumulation, 2, ranks=3)
    with pytest.raises(SpecError, match=r"must have 4 examples, got 3.*drop_last=True"):
        next(Accumulation(8, ranks=2).parts(net(), torch.zeros(3, 6)))


@for_each(
    "wrong, says",
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
    refuses(AttachError, "no parameter", lambda: large_batch(nn.ReLU(), batch=64, base_batch=64, steps=10))


def test_after_the_last_step_the_rate_stays_at_its_end() -> None:
    assert WarmUpThenDecay(steps=4, end=0.25)(100) == 0.25


def run(kind: str, times: int, accuracy: float, seed: int = 0) -> dict[str, Any]:
    steps = EXAMPLES // (BASE * times)
    noise = [{"step": steps // 4, "variance": 1.0, "signal": 1.0}]
    noise += [{"step": steps, "variance": 24.0, "signal": 1.0}]
    told = {"kind": kind, "times": times, "accuracy": accuracy, "seed": seed, "steps": steps}
    return {**told, "noise": noise, "noise_unit": 32}


def test_a_table_has_points_lost_and_what_the_noise_predicts() -> None:
    runs = [run("sgd", 1, 0.6), run("sgd", 1, 0.62, 1), run("lamb", 8, 0.605), run("lars", 8, 0.55)]
    page = large_of(runs, 36)
    assert noise_scale(runs[:2]) == 768
    left = 100 * (64 + 768) / (512 + 768)
    assert f"| 512 | 640 | LAMB | 60.50 | -0.50 | {left:.0f} |" in page
    assert "| 64 | 5,120 | SGD, linear scaling | 61.00 ± 1.00 | +0.00 | 100 |" in page
    assert "LAMB is within 1.5 points of the small batch: it loses 0.50" in page
    assert "4 of 36 runs are done." in page
    assert copies_of([], 15).endswith("0 of 15 runs are done.")


def test_collapsed_seeds_are_counted_and_not_averaged() -> None:
    runs = [run("sgd", 1, 0.6), run("sgd", 8, 0.5), run("sgd", 8, 0.1, 1), run("sgd", 32, 0.1)]
    page = large_of(runs, 36)
    assert "| 512 | 640 | SGD, linear scaling | 50.00 (1 of 2 collapsed) | - |" in page
    assert "| 2,048 | 160 | SGD, linear scaling | - (1 of 1 collapsed) | - |" in page


def test_a_recipe_that_fails_is_said_to_fail() -> None:
    page = large_of([run("sgd", 1, 0.6), run("lars", 8, 0.5)], 36)
    assert "LARS is **not** within 1.5 points of the small batch: it loses 10.00" in page


def test_copies_are_compared_at_equal_steps() -> None:
    def copied(name: str, last: float) -> dict[str, Any]:
        curve = [[step, last * step / 6, 1.0] for step in range(1, 7)]
        told = {"variant": name, "seed": 0, "accuracy": last, "curve": curve}
        return {**told, "inputs": 400, "read": 100}

    page = copies_of([copied("M=1", 0.6), copied("M=4", 0.66)], 15)
    assert "| M=4 | 1 | 22.00 | 44.00 | 66.00 | -6.00 | 400 | 100 |" in page


def test_the_pages_code_runs() -> None:
    text = (ROOT / "docs" / "large_batches.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {"__name__": "page"})


@for_each("times", [1, 8])
def test_every_batch_sees_the_same_examples_in_the_same_order(times: int) -> None:
    n = 100
    data = {"train_x": torch.zeros(n, 3, 32, 32, dtype=torch.uint8), "train_y": torch.arange(n)}
    seen = torch.cat([drawn(data, 3, step, 10 * times)[1] for step in range(240 // (10 * times))])
    small = torch.cat([drawn(data, 3, step, 10)[1] for step in range(24)])
    assert torch.equal(seen, small)
    assert sorted(seen[:n].tolist()) == list(range(n))


def test_a_run_is_planned_once() -> None:
    keys = [trial.key for trial in trials()]
    assert len(set(keys)) == len(keys) == 36
