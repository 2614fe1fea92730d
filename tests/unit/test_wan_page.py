"""The benchmark of wide-area links: when a loss was reached, what a cut did, and the page of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.results import Results
from benchmarks.wan import __main__ as wan
from benchmarks.wan import page
from benchmarks.wan.__main__ import ALONE, DENSE, FAR, NEAR, SPECS, STRATEGIES, TARGET, Run
from benchmarks.wan.figures import longest_pause, steps_during, time_to_loss
from benchmarks.wan.rank import SMOOTHED, WARM_UP

MACHINE = {"cores": 2, "processor": "any"}


def record(losses: list[float]) -> dict[str, Any]:
    return {
        "began": 1000.0,
        "done": [[i, x, 0.5 * (i + 1), 2_000_000 * (i + 1)] for i, x in enumerate(losses)],
    }


def test_a_loss_is_reached_when_its_mean_is_low_enough() -> None:
    low = WARM_UP + 2 * SMOOTHED
    found = time_to_loss(record([TARGET + 0.5] * low + [TARGET - 0.1] * 100), TARGET)
    steps = found["reach_steps"]
    assert low + 0.8 * SMOOTHED < steps <= low + SMOOTHED
    assert found["reach_s"] == 0.5 * steps and found["reach_mb"] == 2 * steps
    assert time_to_loss(record([TARGET] * (WARM_UP + SMOOTHED)), TARGET)["reach_steps"] == WARM_UP + SMOOTHED
    never = time_to_loss(record([TARGET + 0.5] * 200), TARGET)
    assert never["reach_s"] is None and never["last_loss"] == TARGET + 0.5


def test_steps_and_pauses_are_counted_from_the_cut_on() -> None:
    seconds = [1.0, 5.0, 6.0, 7.0, 15.0, 16.0]
    found = {"began": 1000.0, "done": [[i, 2.0, each, 0] for i, each in enumerate(seconds)]}
    cut = (1005.5, 1014.0)
    assert steps_during(found, cut) == 2
    assert longest_pause(found, cut) == 8.0
    late = record([2.0] * (WARM_UP + 9))
    late["done"][-1][2] += 30.0
    assert longest_pause(late, None) == 30.5


def test_the_page_compares_with_dense_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wan, "RUNS", Results(tmp_path / "results.jsonl"))
    assert page.pages(tmp_path) == {}
    row = {
        "lr": 0.008,
        "reach_s": 100.0,
        "reach_steps": 400,
        "reach_mb": 80.0,
        "pause_s": [1.0, 2.0, 1.0, 1.0],
    }
    row |= {"machine": MACHINE, "alike": True, "returned": True, "during_cut": None}
    row |= {"network": {"latency_s": 0.1, "bytes_a_second": 1e6}}
    wan.RUNS.put(Run(NEAR, DENSE).key, row)
    wan.RUNS.put(Run(NEAR, STRATEGIES[0]).key, row | {"reach_s": 25.0})
    assert page.times(row | {"reach_s": None, "seconds": 250.0}, 50.0) == "more than 5.0 times"
    late = {"reach_s": None, "last_loss": 2.5, "steps": [60] * 4, "seconds": 400.0}
    wan.RUNS.put(Run(FAR, DENSE).key, row | late)
    cut = {"during_cut": [9, 8, 1, 0], "pause_s": [11.0, 10.5, 61.0, 60.0], "alike": False}
    wan.RUNS.put(Run(NEAR, STRATEGIES[0], cut=True).key, row | {"reach_s": 90.0} | cut)
    text = page.page()
    assert f"| `{STRATEGIES[0]}` | 0.008 | 400 | 25 | 4.0 times | 80.0 | 2.0 |" in text
    assert "not reached: 2.50 after 60 steps, 400 s" in text
    assert f"| `{STRATEGIES[0]}` | 8 | 0 | 11.0 | 61.0 | 90 | 25 | **not equal** |" in text
    assert "100 ms a message, 8.0 Mbit/s a rank." in text
    assert "one region alone" not in text
    wan.RUNS.put(Run(ALONE, DENSE).key, row | {"reach_s": 17.0, "reach_steps": 350})
    assert "350 steps, 17 s." in page.page()
    assert text.count("Not done yet: ") == 2 and f"`{SPECS[-1]}`" in text
