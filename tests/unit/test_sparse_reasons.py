"""Why top-k stays below dense training: a try changes one thing, and the page tells of what is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.common.results import Results
from benchmarks.common.small_net import net
from benchmarks.sparse_reasons import __main__ as sparse_reasons
from benchmarks.sparse_reasons import page
from benchmarks.sparse_reasons.__main__ import STEPS, TRIES, Run, do, runs, without_momentum
from benchmarks.sparse_steps import __main__ as sparse_steps
from benchmarks.sparse_steps.__main__ import Run as Plain

from laconic.core.spec import parse


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("reasons", sparse_reasons), ("steps", sparse_steps)):
        monkeypatch.setattr(module, "RUNS", Results(tmp_path / f"{name}.jsonl"))


def test_a_try_is_done_as_it_says() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (64, 3, 32, 32), generator=rng).to(torch.uint8)
    data = {"train_x": x, "train_y": x[:, 0, 0, 0] % 10, "test_x": x, "test_y": x[:, 0, 0, 0] % 10}
    run = Run("topk, no momentum", 0)
    row = do(run, data, steps=3)
    assert row["lr"] == 10 * sparse_steps.LR and row["momentum"] == 0 and row["spec"] == "topk(density=0.01)"
    assert run.read() == json.loads(json.dumps(row))
    optimizer = without_momentum(net(), 0.1, parse("topk(density=0.01)"))
    assert optimizer.param_groups[0]["momentum"] == 0


def test_the_page_tells_of_what_is_done() -> None:
    assert len({run.key for run in runs()}) == len(list(runs())) == 3 * len(TRIES)
    assert page.section() == []
    dense, topk = Plain("dense", 1, STEPS, 0), Plain("topk", 0.01, STEPS, 0)
    sparse_reasons.RUNS.put(Run("topk, no momentum", 0).key, {"accuracy": 0.58, "momentum": 0.0})
    for run, accuracy in ((topk, 0.52), (dense, 0.56)):
        sparse_steps.RUNS.put(run.key, {"accuracy": accuracy, "momentum": 0.0})
    told = page.section()
    assert "| topk, no momentum | 0.5 | 0 | 58.00 | 1 |" in told
    assert "| dense | 0.05 | 0.9 | 56.00 | 1 |" in told
    assert "- `topk(density=0.01)` ends 6.00 points higher without momentum." in told
