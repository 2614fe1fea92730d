"""Accuracy with coded activations: runs go on where they stopped, and the page shows what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import activations_accuracy as accuracy
from benchmarks.pages import activations as page

HITS = {"dense": (0.50, 0.52), "comet()": (0.505, 0.515)}


def row(net: str, variant: str, seed: int, plan: accuracy.Plan) -> dict[str, Any]:
    about = {"net": net, "variant": variant, "seed": seed, "steps": plan.steps, "batch": plan.batch}
    return about | {"accuracy": HITS[variant][seed], "loss": 1.0, "ratio": 8.0, "cpu_s": 1.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(accuracy, "FOLDER", tmp_path)
    monkeypatch.setattr(accuracy, "trained", row)
    return tmp_path


def test_a_run_with_a_file_is_not_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy.measure("vgg", seeds=1, folder=folder)
    assert len(capsys.readouterr().out.splitlines()) == 2
    accuracy.measure("vgg", seeds=2, folder=folder)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(accuracy.rows(folder)) == 4


def test_the_page_compares_seeds_with_dense_of_the_same_seed(folder: Path) -> None:
    assert "## Accuracy" not in page.page()
    accuracy.measure("vgg", seeds=1, folder=folder)
    assert "| vgg | 1600 of 32 | `comet()` | 50.50 | +0.50 | 8.0 | 1 |" in page.page()
    accuracy.measure("vgg", seeds=2, folder=folder)
    text = page.page()
    assert "| vgg | 1600 of 32 | `dense` | 51.00 ± 1.41 | - | 8.0 | 2 |" in text
    assert "| vgg | 1600 of 32 | `comet()` | 51.00 ± 0.71 | +0.00 ± 0.71 | 8.0 | 2 |" in text
    accuracy.file_of("vgg", "dense", 1, accuracy.PLANS["vgg"], folder).unlink()
    assert "| vgg | 1600 of 32 | `comet()` | 51.00 ± 0.71 | +0.50 | 8.0 | 2 |" in page.page()


def test_variants_of_a_net_train_equally_long() -> None:
    for file in accuracy.FOLDER.glob("*.json"):
        kept = json.loads(file.read_text())
        plan = accuracy.PLANS[kept["net"]]
        assert (kept["steps"], kept["batch"]) == (plan.steps, plan.batch)
        assert kept["variant"] in plan.variants
