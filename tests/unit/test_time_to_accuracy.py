"""Time to accuracy: what is trained is what a user would type, and the page tells what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.common.results import Results
from benchmarks.time_to_accuracy import __main__ as time_to_accuracy
from benchmarks.time_to_accuracy import page
from benchmarks.time_to_accuracy.__main__ import GOALS, LINKS, METHODS, SEEDS, Run, command, runs

from laconic.strategies.distribute import strategy_or_method


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(time_to_accuracy, "RUNS", Results(tmp_path / "results.jsonl"))
    return time_to_accuracy.RUNS


def row(reach_s: float | None, accuracy: float = 0.6) -> dict[str, float | None]:
    return {"reach_s": reach_s, "accuracy": accuracy, "step_s": 0.1, "wire_mb": 1.5}


def test_every_training_is_planned_once(stored: Results) -> None:
    planned = list(runs())
    assert len(set(planned)) == len(planned) == len(GOALS) * len(LINKS) * len(METHODS) * len(SEEDS)
    assert len({run.key for run in planned}) == len(planned)
    assert [run.seed for run in planned] == sorted(run.seed for run in planned)
    assert all(strategy_or_method(spec) for spec in METHODS)
    run = Run(GOALS[1], LINKS[1], "dense()", 0)
    assert run.read() is None
    stored.put(run.key, row(1.0))
    assert run.read() == row(1.0)


def test_the_command_names_the_link_and_the_target(tmp_path: Path) -> None:
    words = command(Run(GOALS[0], "100mbit", "cgx(bits=4)", 2), tmp_path, 50)
    given = {
        name: words[words.index(f"--{name}") + 1] for name in ("link", "target", "seed", "with", "against")
    }
    spec = "cgx(bits=4)"
    assert given == {"link": "100mbit", "target": "60", "seed": "2", "with": spec, "against": spec}


def test_the_page_compares_with_dense_of_the_same_seeds(stored: Results) -> None:
    assert not page.done()
    goal, link = GOALS[0], LINKS[0]
    for seed, (dense, quick) in enumerate(((100.0, 20.0), (140.0, 28.0))):
        stored.put(Run(goal, link, "dense()", seed).key, row(dense))
        stored.put(Run(goal, link, "cgx(bits=4)", seed).key, row(quick))
    stored.put(Run(goal, link, "auto()", 0).key, row(None, 0.5))
    assert page.done()
    text = page.page()
    assert "## cifar10, `cnn`, to 60 %, 100mbit" in text
    assert "| `cgx(bits=4)` | 24.0 ± 4.0 | 5.0 times | 60.00 ± 0.00 | 100 | 1,500.0 | 2 |" in text
    assert "| `auto()` | not reached with 1 of 1 seeds | - | 50.00 |" in text
    assert "1gbit" not in text


def test_the_picture_shows_means_over_seeds_and_only_links_with_trainings(stored: Results) -> None:
    goal, link = GOALS[1], LINKS[0]
    for seed, (seconds, percent) in enumerate((([1.0, 3.0], [20.0, 40.0]), ([2.0, 5.0], [30.0, 50.0]))):
        stored.put(Run(goal, link, "fp16()", seed).key, {"seconds": seconds, "percent": percent})
    mean = page.curve(page.of(goal, link, "fp16()"))
    assert (mean.x.tolist(), mean.y.tolist()) == ([1.5, 4.0], [25.0, 45.0])
    text = page.picture(goal)
    assert text.count("<polyline") == len(METHODS) and f"over {link}" in text and "over 1gbit" not in text
    assert [*page.pictures(Path("docs"))] == [Path("docs/time_to_accuracy-shakespeare.svg")]
