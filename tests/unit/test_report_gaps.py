"""Runs whose record has gaps: what a killed launcher did not write, tests of one seed, losses of inf."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.shared import refuses

from laconic.core.errors import StateError
from laconic.tools.cli import session
from laconic.tools.cli.session import finished, on_record
from laconic.tools.report import Ledger, publish
from laconic.tools.report.curves import trailing_mean
from laconic.tools.report.figure import Figure
from laconic.tools.report.ledger import EVENTS, read_events
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.settings import Event, TrainingSettings

from .test_cli_failures import train
from .test_report_summary import CONFIG, step_event, test_event, write_run

SPEC = "dense()"


def without(folder: Path, missing: Callable[[dict[str, Any]], bool]) -> None:
    """Remove events from a run's record."""
    kept = [event for event in read_events(folder) if not missing(event)]
    (folder / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in kept))


def settings(folder: Path, **more: Any) -> Any:
    return SimpleNamespace(**({"folder": folder, "workers": 2, "steps": 4, "eval_every": 2} | more))


def test_steps_that_were_never_written_spoil_no_time_to_accuracy(tmp_path: Path) -> None:
    config = {**CONFIG, "seeds": 1, "methods": [SPEC], "target": 80.0}
    write_run(tmp_path, config)
    whole = publish(tmp_path).rows[0]
    without(tmp_path, lambda event: event["kind"] == "step" and event["step"] == 3)
    without(tmp_path, lambda event: event["kind"] == "eval" and event["step"] == 2)
    row = publish(tmp_path).rows[0]
    assert whole.reach_s.mean == pytest.approx(0.02) and row.reach_s.mean == pytest.approx(0.03)


def test_the_last_test_of_a_row_is_one_that_all_seeds_have(tmp_path: Path) -> None:
    write_run(tmp_path, {**CONFIG, "methods": [SPEC]})
    spoilt = tmp_path / EVENTS
    spoilt.write_text(spoilt.read_text().replace('"right": 7, "answers": 10', '"right": 5, "answers": 10', 2))

    def accuracy() -> float:
        return publish(tmp_path).rows[0].accuracy.mean

    assert accuracy() == pytest.approx(0.8)
    without(tmp_path, lambda event: event["seed"] == 1 and event["step"] > 3)
    assert accuracy() == pytest.approx((0.9 + 0.5) / 2)
    without(tmp_path, lambda event: event["seed"] == 1 and event["kind"] == "eval")
    assert math.isnan(accuracy())
    lines = spoilt.read_text().splitlines(keepends=True)
    spoilt.write_text("".join([*lines[:2], lines[2][:20] + "\n", *lines[3:]]))
    refuses(StateError, r"events\.jsonl, line 3 is damaged", read_events, tmp_path)


def checkpoints(folder: Path, steps: tuple[int, ...]) -> None:
    for step in steps:
        for rank in (1, 0):
            checkpoint.save(folder, {}, step=step, rank=rank, size=2, barrier=lambda: None, keep=9)


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_on_record(tmp_path: Path) -> None:
    write_run(tmp_path, {**CONFIG, "methods": [SPEC]})
    place = tmp_path / "dense" / "seed0"
    assert on_record(settings(tmp_path), SPEC, 0, place) is None
    checkpoints(place, (1, 2, 4))

    def step() -> int:
        found = on_record(settings(tmp_path), SPEC, 0, place)
        assert found is not None
        return checkpoint.step_of(found)

    assert step() == 4
    found = on_record(settings(tmp_path, eval_every=0), SPEC, 0, place)
    assert found is not None and checkpoint.step_of(found) == 4
    last_test = [event for event in read_events(tmp_path) if event["kind"] == "eval" and event["step"] == 4]
    without(tmp_path, lambda event: event in last_test[:1])
    assert step() == 2, "without its last test a training would end untested"
    without(tmp_path, lambda event: event["kind"] == "step" and event["step"] == 2 and event["rank"] == 1)
    assert step() == 1
    without(tmp_path, lambda event: event["kind"] == "step")
    assert step() == 1, "nothing is on record, and the training goes on from what there is"


def test_checkpoints_later_than_the_one_taken_are_removed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(plan: TrainingSettings) -> Iterator[Event]:
        first = checkpoint.step_of(plan.resume_from) if plan.resume_from else 0
        found.append((first, [checkpoint.step_of(each) for each in checkpoint.complete(plan.folder)]))
        checkpoints(plan.folder, tuple(range(first + 1, 5)))
        for step in range(first + 1, 5):
            for kind in (step_event, test_event):
                yield from (kind(plan.spec, plan.seed, rank, step) for rank in range(plan.workers))

    found: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(session, "launch", launch)
    arguments = ["--steps", "4", "--eval-every", "2", "--workers", "2", "--seeds", "1"]
    assert train(tmp_path, *arguments).exit_code == 0
    without(tmp_path / "run", lambda event: event["step"] == 3 and event["rank"] == 1)
    without(tmp_path / "run", lambda event: event["step"] == 4 and event["kind"] == "eval")
    again = train(tmp_path, *arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert found == [(0, []), (2, [1, 2])]
    steps = [(e["rank"], e["step"]) for e in read_events(tmp_path / "run") if e["kind"] == "step"]
    assert sorted(steps) == [(rank, step) for rank in range(2) for step in range(1, 5)]


def test_a_training_that_lost_a_worker_for_good_has_finished(tmp_path: Path) -> None:
    lost = {"kind": "lost", "method": SPEC, "seed": 0, "rank": 1, "step": 3}
    with Ledger(tmp_path, {**CONFIG, "methods": [SPEC]}) as ledger:
        for rank in range(2):
            ledger.write(step_event(SPEC, 0, rank, 1))
        ledger.write(lost)
        ledger.write(test_event(SPEC, 0, 0, 4))
    assert finished(settings(tmp_path)) == {(SPEC, 0)}
    with Ledger(tmp_path, {**CONFIG, "methods": [SPEC]}) as ledger:
        ledger.write({**lost, "kind": "back"})
    assert finished(settings(tmp_path)) == set()


def test_a_loss_that_is_not_finite_leaves_a_gap_and_not_the_rest() -> None:
    smooth = trailing_mean(np.array([[1.0, np.inf, 3.0, np.nan, 5.0, 7.0]]), 2)
    np.testing.assert_array_equal(smooth, [[1.0, np.nan, np.nan, np.nan, np.nan, 6.0]])
    figure = Figure.of([math.inf, 1.0])
    assert figure.mean == math.inf and math.isnan(figure.error)
