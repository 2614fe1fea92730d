"""ResNet-9 by many methods: searches, trainings that go on where they stopped, and the page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks.common.results import Results, Row
from benchmarks.resnet9 import __main__ as resnet9
from benchmarks.resnet9 import forecast, page
from benchmarks.resnet9.__main__ import DIVERGED, METHODS, SEEDS, STEPS, Run, due, own_rate, train
from benchmarks.resnet9.model import prepared, raw

SIGN, STC, DGC = "sign()", "stc(density=0.01)", "dgc(density=0.01, warmup_steps={})"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(resnet9, "RUNS", Results(tmp_path / "results.jsonl"))
    monkeypatch.setattr(forecast, "FILE", tmp_path / "forecasts.json")
    return resnet9.RUNS


def row_of(run: Run, best: float) -> Row:
    """Return a training that is best at one rate, and diverges at four times as much."""
    row = {"lr": run.rate, "seed": run.seed, "machine": {"processor": "a processor"}}
    if run.rate >= 4 * best:
        return row | {DIVERGED: "too fast"}
    loss = 1 + abs(math.log2(run.rate / best)) / 10 + METHODS.index(run.method) / 100 + run.seed / 1000
    figures = {"test_loss": loss, "accuracy": 1 - loss / 10, "smaller": 3.0, "sent_mb": 18.0}
    return row | figures | {"accuracies": [0.5, 1 - loss / 10], "parameters": 400_000}


def fill(methods: tuple[str, ...], best: float = 0.8) -> list[Run]:
    done: list[Run] = []
    for method in methods:
        for run in due(16, method):
            resnet9.RUNS.put(run.key, row_of(run, best))
            done.append(run)
    return done


@pytest.mark.parametrize("best", [0.1, 0.4, 1.6])
def test_full_runs_are_at_the_rate_that_short_runs_have_found(stored: Results, best: float) -> None:
    done = fill((SIGN,), best)
    assert own_rate(SIGN, 16) == best
    assert [(run.rate, run.seed, run.steps) for run in done if run.steps == STEPS] == [(best, 0, STEPS)]
    assert fill((SIGN,)) == []


def test_presets_have_more_seeds_and_workers(stored: Results) -> None:
    full = [(run.seed, run.workers) for run in fill((STC,)) if run.steps == STEPS]
    assert sorted(full) == sorted((seed, workers) for seed in SEEDS for workers in (4, 8))


def test_a_warm_up_is_a_share_of_the_steps() -> None:
    assert Run(DGC, 0.4).spec == "dgc(density=0.01, warmup_steps=388)"
    assert Run(DGC, 0.4, steps=349).spec == "dgc(density=0.01, warmup_steps=77)"


def test_the_page_tells_what_is_lost_and_what_is_missing(stored: Results) -> None:
    assert page.pages(Path()) == {}
    fill(("dense()", SIGN))
    resnet9.RUNS.put(Run(SIGN, 0.8).key, row_of(Run(SIGN, 0.8), 0.1))
    fill((STC,))
    text = page.page()
    assert "| `stc(density=0.01)` | 0.8 | 89.79 ± 0.01 | 0.20 ± 0.00 | 3.0 times | 3 |" in text
    assert "| `sign()` | 0.8 | diverged with 1 of 1 seeds |  |  | 1 |" in text
    assert "Not done yet: `cgx(bits=4)`" in text
    assert [*page.pages(Path())] == [Path("resnet9.md"), Path("resnet9-16.svg")]
    assert page.picture(16).count("<polyline") >= 2


@pytest.mark.parametrize("method", ["dense()", "local_sgd(every=10)"])
def test_a_training_counts_its_bytes_and_tests_its_model(method: str) -> None:
    images = prepared(raw(small=True), torch.device("cpu"))
    row = train(Run(method, 0.4, workers=8, width=8), images, torch.device("cpu"), stop=1)
    assert row["parameters"] > 100_000 and (row["sent_mb"] > 0) == (method == "dense()")
    assert 0 <= row["accuracy"] <= 1 and row["accuracies"] == [row["accuracy"]]


def test_a_method_without_dense_training_beside_it_has_a_row(stored: Results) -> None:
    fill(("dense()", STC))
    for seed in SEEDS:
        resnet9.RUNS.put(Run("dense()", 0.8, seed, workers=8).key, row_of(Run("dense()", 0.8), 0.1))
    assert "| `stc(density=0.01)` | 0.8 | 89.79 ± 0.01 |  | 3.0 times | 3 |" in page.page()


def test_a_loss_that_is_not_finite_counts_as_diverged() -> None:
    images = prepared(raw(small=True), torch.device("cpu"))
    row = train(Run("local_sgd(every=10)", 1e30, width=8), images, torch.device("cpu"), stop=2)
    assert DIVERGED in row and "test_loss" not in row
