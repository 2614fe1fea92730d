"""Workers of `laconic train` that die: strategies with patience go on, methods end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from itertools import pairwise

import pytest

from laconic.core.errors import SpecError
from laconic.tools.tasks.launcher import WorkerFailed, launch
from tests.dist.plans import digits_plan
from tests.unit.test_cli_settings import settings

STEPS = 300  # a busy machine may read of step 5 when workers are far ahead
TOO_LATE = "their training has ended", "the worker does not respond"  # of one that began after the end


@pytest.fixture
def plan(tmp_path):
    return digits_plan(tmp_path, workers=3, steps=STEPS, eval_every=100, patience=20.0)


def events_of(plan):
    """All events; a worker is killed when each has done a few steps."""
    others, events, killed = set(multiprocessing.active_children()), [], False
    for event in launch(plan):
        events.append(event)
        if event["kind"] == "step" and event["step"] == 5 and not killed:
            killed = True
            worker = next(each for each in multiprocessing.active_children() if each not in others)
            os.kill(worker.pid, signal.SIGKILL)
    return events


def test_a_strategy_with_patience_goes_on_without_a_killed_worker(plan):
    events = events_of(plan)
    (lost,) = (event for event in events if event["kind"] == "lost")
    assert "was killed by SIGKILL" in lost["message"]
    assert lost["step"] < STEPS
    survivors = {0, 1, 2} - {lost["rank"]}
    last = [event for event in events if event["kind"] == "eval" and event["step"] == STEPS]
    assert {event["rank"] for event in last} == survivors
    assert sum(event["answers"] for event in last) == 360
    for rank in survivors:
        done = [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank]
        assert done[-1] == STEPS
        assert all(before < after for before, after in pairwise(done))


def test_a_killed_worker_that_is_started_anew_is_there_at_the_end(plan):
    steps = 600
    for _ in range(3):
        events = events_of(replace(plan, steps=steps, eval_every=steps, restarts=1))
        lost, *again = (event for event in events if event["kind"] == "lost")
        if not again or not any(words in again[0]["message"] for words in TOO_LATE):
            break
    assert not again, again
    (back,) = (event for event in events if event["kind"] == "back")
    assert back["rank"] == lost["rank"] and lost["step"] < back["step"] < steps
    last = [event for event in events if event["kind"] == "eval" and event["step"] == steps]
    assert {event["rank"] for event in last} == {0, 1, 2}
    assert sum(event["right"] for event in last) > 0.9 * 360


def test_fewer_than_the_quorum_end_the_run(plan):
    with pytest.raises(WorkerFailed, match="quorum"):
        events_of(replace(plan, quorum=3))


def test_a_method_ends_with_its_worker(plan):
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        events_of(replace(plan, spec="dense()"))


def test_patience_is_checked_and_excludes_checkpoints(tmp_path):
    with pytest.raises(SpecError, match="--patience must be a finite number above 0"):
        settings(tmp_path, methods=("sgp()",), patience=0)
    with pytest.raises(SpecError, match="cannot be combined"):
        settings(tmp_path, methods=("sgp()",), patience=5.0, checkpoint_every=10)


def test_a_quorum_is_of_the_workers_and_goes_with_patience(tmp_path):
    with pytest.raises(SpecError, match=r"--quorum.*add it, such as --patience 30"):
        settings(tmp_path, quorum=2)
    for wrong in (0, 3):
        with pytest.raises(SpecError, match=rf"--quorum must be a whole number in 1\.\.2, got {wrong}"):
            settings(tmp_path, methods=("sgp()",), patience=5.0, quorum=wrong)
    assert settings(tmp_path, methods=("sgp()",), patience=5.0, quorum=2).config()["quorum"] == 2


def test_restarts_are_of_those_with_patience(tmp_path):
    with pytest.raises(SpecError, match="add --patience"):
        settings(tmp_path, restarts=1)
    with pytest.raises(SpecError, match=r"--restarts must be 0 \(none\) or more, got -1"):
        settings(tmp_path, methods=("sgp()",), patience=5.0, restarts=-1)
