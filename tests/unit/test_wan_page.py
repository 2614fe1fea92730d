"""The benchmark of wide-area links: when a loss was reached, what a cut did, and the page of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.common.results import Results
from benchmarks.wan import __main__ as wan
from benchmarks.wan import page
from benchmarks.wan.__main__ import DENSE, FAR, NEAR, SPECS, TARGET, Run, during, longest_pause, reached
from benchmarks.wan.rank import SMOOTHED, WARM_UP

MACHINE = {"cores": 2, "processor": "any"}


def test_a_loss_is_reached_when_its_mean_is_low_enough() -> None:
    low = WARM_UP + 2 * SMOOTHED
    losses = [TARGET + 0.5] * low + [TARGET - 0.1] * 100
    seconds = [0.5 * step for step in range(len(losses))]
    found = reached(losses, seconds, [{"sent": [1000 + 2_000_000 * step for step in range(len(losses))]}])
    steps = found["reach_steps"]
    assert low + 0.8 * SMOOTHED < steps <= low + SMOOTHED
    assert found["reach_s"] == 0.5 * (steps - 1) and found["reach_mb"] == 2 * (steps - 1)
    never = reached([TARGET + 0.5] * 200, [0.0] * 200, [])
    assert never["reach_s"] is None and never["last_loss"] == TARGET + 0.5


def test_steps_and_pauses_are_counted_from_the_cut_on() -> None:
    record = {"began": 1000.0, "seconds": [1.0, 5.0, 6.0, 7.0, 15.0, 16.0]}
    cut = [1005.5, 1014.0]
    assert during(record, cut) == 2
    assert longest_pause(record, cut) == 8.0
    assert longest_pause(record | {"seconds": [1.0, 50.0, 51.0]}, None) == 49.0


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
    row |= {"machine": MACHINE, "alike": True, "during_cut": None}
    wan.RUNS.put(Run(NEAR, DENSE).key, row)
    wan.RUNS.put(Run(NEAR, SPECS[1]).key, row | {"reach_s": 25.0})
    assert page.times(row | {"reach_s": None, "seconds": 250.0}, 50.0) == "more than 5.0 times"
    late = {"reach_s": None, "last_loss": 2.5, "steps": [60] * 4, "seconds": 400.0}
    wan.RUNS.put(Run(FAR, DENSE).key, row | late)
    cut = {"during_cut": [9, 8, 1, 0], "pause_s": [11.0, 10.5, 61.0, 60.0], "alike": False}
    wan.RUNS.put(Run(NEAR, SPECS[1], cut=True).key, row | {"reach_s": 90.0} | cut)
    text = page.page()
    assert f"| `{SPECS[1]}` | 0.008 | 400 | 25 | 4.0 times | 80.0 | 2.0 |" in text
    assert "not reached: 2.50 after 60 steps, 400 s" in text
    assert f"| `{SPECS[1]}` | 8 | 0 | 11.0 | 61.0 | 90 | 25 | **no** |" in text
    assert text.count("Not done yet: ") == 2 and f"`{SPECS[-1]}`" in text
