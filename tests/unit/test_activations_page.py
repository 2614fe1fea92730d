"""Accuracy with coded activations: runs go on where they stopped, and the page shows what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.activations import __main__ as activations
from benchmarks.activations import accuracy, page
from benchmarks.common.results import Results
from torch import Tensor, nn


class Nothing:
    """Black images, all of one class."""

    def __init__(self, batch: int, seed: int) -> None:
        self.data = {"test_x": torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "test_y": torch.zeros(2)}

    def next(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)


HITS = {"dense": (0.50, 0.52), "nudged": (0.51, 0.51), "comet()": (0.505, 0.515)}
HITS |= dict.fromkeys(("comet(share=0.1)", "blocks(bits=2)"), (0.5, 0.5))


def row(net: str, variant: str, seed: int, plan: accuracy.Plan) -> dict[str, Any]:
    about = {"net": net, "variant": variant, "seed": seed, "steps": plan.steps, "batch": plan.batch}
    return about | {"accuracy": HITS[variant][seed], "loss": 1.0, "ratio": 8.0, "cpu_s": 1.0}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(accuracy, "RUNS", Results(tmp_path / "results.jsonl"))
    monkeypatch.setattr(accuracy, "trained", row)
    return accuracy.RUNS


def test_a_stored_run_is_not_repeated(stored: Results, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy.measure("vgg", seeds=1, stored=stored)
    assert len(capsys.readouterr().out.splitlines()) == 3
    accuracy.measure("vgg", seeds=2, stored=stored)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert len(stored.rows("accuracy")) == 6


def test_the_page_compares_seeds_with_dense_of_the_same_seed(
    stored: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "## Accuracy" not in page.page()
    accuracy.measure("vgg", seeds=1, stored=stored)
    assert "| vgg | 1600 of 32 | `comet()` | 50.50 | +0.50 | 8.0 | 1 |" in page.page()
    accuracy.measure("vgg", seeds=2, stored=stored)
    text = page.page()
    assert "| vgg | 1600 of 32 | `dense` | 51.00 ± 1.41 | - | 8.0 | 2 |" in text
    assert "| vgg | 1600 of 32 | `comet()` | 51.00 ± 0.71 | +0.00 ± 0.71 | 8.0 | 2 |" in text
    monkeypatch.setattr(accuracy, "RUNS", Results(stored.file.with_name("less.jsonl")))
    for kept in stored.rows("accuracy"):
        if (kept["variant"], kept["seed"]) != ("dense", 1):
            accuracy.RUNS.put(f"accuracy/{kept['variant']}-{kept['seed']}", kept)
    assert "| vgg | 1600 of 32 | `comet()` | 51.00 ± 0.71 | +0.50 | 8.0 | 2 |" in page.page()


def test_the_page_explains_what_is_there_alone(stored: Results) -> None:
    accuracy.measure("cnn", seeds=1, stored=stored)
    text = page.page()
    assert "1,600 steps" not in text and "VGG-like" not in text and "*nudged* is" not in text
    accuracy.measure("vgg", seeds=1, stored=stored)
    text = page.page()
    assert "For the VGG-like net these are 1,600 steps" in text and "*nudged* is" in text


def test_nudged_training_begins_a_millionth_away(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> float:
        optimizer.step()
        seen.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
        return 1.0

    monkeypatch.setattr(activations, "Batches", Nothing)
    monkeypatch.setattr(activations, "step", step)
    for variant in ("dense", accuracy.NUDGED):
        accuracy.trained("cnn", variant, 0, accuracy.Plan(1, 4))
    dense, nudged = seen
    assert torch.equal(nudged, dense * (1 + accuracy.NUDGE))
    assert 0 < float((nudged - dense).abs().max()) < 1e-5


def test_variants_of_a_net_train_equally_long() -> None:
    for kept in accuracy.RUNS.rows("accuracy"):
        plan = accuracy.PLANS[kept["net"]]
        assert (kept["steps"], kept["batch"]) == (plan.steps, plan.batch)
        assert kept["variant"] in plan.variants
