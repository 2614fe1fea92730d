"""How many steps sparse methods need: trainings are reproducible, and the page tells what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.common.results import Results
from benchmarks.sparse_reasons import __main__ as sparse_reasons
from benchmarks.sparse_steps import __main__ as sparse_steps
from benchmarks.sparse_steps import page
from benchmarks.sparse_steps.__main__ import LENGTHS, METHODS, SEEDS, Run, do, runs
from torch import Tensor


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sparse_steps, sparse_reasons):
        monkeypatch.setattr(module, "RUNS", Results(tmp_path / f"{module.__name__}.jsonl"))


@pytest.fixture
def data() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (64, 3, 32, 32), generator=rng).to(torch.uint8)
    y = (x.float().mean((1, 2, 3)) > 127.5).to(torch.uint8)
    return {"train_x": x, "train_y": y, "test_x": x[:32], "test_y": y[:32]}


def write(run: Run, accuracy: float, sent_mb: float) -> None:
    row = {"accuracy": accuracy, "test_loss": 2 - accuracy, "sent_mb": sent_mb}
    sparse_steps.RUNS.put(run.key, row)


def test_each_sparse_run_has_a_dense_one_of_its_length() -> None:
    planned = list(runs())
    assert len(set(planned)) == len(planned)
    for run in planned:
        assert Run("dense", 1, run.steps, run.seed) in planned
    assert len(planned) == len(SEEDS) * sum(map(len, LENGTHS.values())) * (1 + len(METHODS))


def test_a_training_is_reproducible(data: dict[str, Tensor]) -> None:
    for method in ("dense", *METHODS):
        run = Run(method, 1 if method == "dense" else 0.1, 5, 0)
        once, again = (do(run, data, lasting=False) for _ in range(2))
        assert run.read() is None
        assert once["curve"] == again["curve"], method
        assert once["sent_mb"] == again["sent_mb"]
        assert len(once["curve"]) == 5


def test_workers_train_as_one_on_their_mean_gradient(data: dict[str, Tensor]) -> None:
    row = do(Run("dense", 1, 12, 1), data, lasting=False)
    assert row["curve"][-1][1] < row["curve"][0][1]
    dense_mb = 12 * 2 * 3 / 4 * 4 * row["parameters"] / 1e6  # an all-reduce among four
    assert dense_mb < row["sent_mb"] < 1.1 * dense_mb  # packet headers
    sparse = do(Run("topk", 0.01, 5, 0), data, lasting=False)
    assert sparse["sent_mb"] / 5 < row["sent_mb"] / 12 / 10


def test_the_page_compares_with_dense_of_the_same_length_and_seed() -> None:
    assert not page.done()
    for seed, accuracy in enumerate((0.50, 0.52)):
        write(Run("dense", 1, 1000, seed), accuracy + 0.01, 100)
        write(Run("topk", 0.01, 1000, seed), accuracy, 4)
    write(Run("topk", 0.01, 2000, 0), 0.6, 8)  # without dense training there is nothing to compare
    assert page.done()
    told = next(line for line in page.page().splitlines() if line.startswith("| `error_fed(topk("))
    assert "| 1,000 | 10 | 51.00 ± 1.00 | 52.00 ± 1.00 | 1.00 ± 0.00 |" in told
    assert told.endswith("| 4 | 25 times | 2 |")
    assert "2,000" not in page.page()


def test_the_page_says_how_the_gap_falls() -> None:
    for steps, lost in ((1000, 0.03), (2000, 0.01)):
        write(Run("dense", 1, steps, 0), 0.5, 100)
        write(Run("topk", 0.01, steps, 0), 0.5 - lost, 4)
    spec = "error_fed(topk(density=0.01), momentum='optimizer')"
    told = f"- `{spec}` loses 3.00 points after 1,000 steps, 1.00 after 2,000 (20 / density)."
    assert told in page.page()
    drawn = page.picture()
    assert drawn.count("<polyline") == 2, "what has no runs is not drawn"
