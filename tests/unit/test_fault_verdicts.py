"""Checks of the campaign of disturbed runs: each fails when it should, and all choices are repeatable."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.faults.schedule import BUSY, KILLED, NOT_FINITE, PAUSED, RAISED, STOPPED, Run, runs
from benchmarks.faults.verdicts import (
    CODE,
    DIVERGED,
    HANG,
    LOST,
    ON_PURPOSE,
    NotDisturbedError,
    failed_checks,
)

STEPS, MOST_STEPS = 24, 4000
METHOD = {"model": "a", "finite": True, "skipped": [], "parameters_kept": True, "memory_kept": True}
STRATEGY = {"model": "a", "finite": True, "living": [0, 1], "steps": STEPS}
SKIPPED = {**METHOD, "skipped": [5]}
LEFT = {**STRATEGY, "living": [1]}


def ended(codes: list[int | None], results: list[Any], **changes: Any) -> dict[str, Any]:
    """What a player reports."""
    whole = {"errors": [ON_PURPOSE, ""], "disturbed": True, "noticed": True}
    return {"codes": codes, "results": results, **whole, **changes}


def checks(fault: str, spec: str, report: dict[str, Any]) -> dict[str, str]:
    """The failed checks of two ranks, where rank 0 is disturbed in step 5."""
    return failed_checks(Run(fault, spec, 0, 2, 0, 5, 1.0), report, "a", STEPS, MOST_STEPS)


@pytest.mark.parametrize(
    ("fault", "spec", "codes", "results", "wrong"),
    [
        (PAUSED, "cgx()", [0, 0], [METHOD, METHOD], set()),
        (PAUSED, "cgx()", [0, 0], [None, METHOD], {CODE}),
        (PAUSED, "cgx()", [0, 0], [METHOD | {"model": "b"}] * 2, {LOST}),
        (BUSY, "cgx()", [0, 0], [METHOD | {"model": "b"}] * 2, {LOST}),
        (PAUSED, "cgx()", [0, 0], [METHOD, METHOD | {"model": "b"}], {DIVERGED, LOST}),
        (PAUSED, "cgx()", [0, 0], [METHOD, SKIPPED], {LOST}),
        (PAUSED, "auto()", [0, 0], [METHOD | {"model": "b"}] * 2, set()),
        (PAUSED, "sgp()", [0, None], [STRATEGY, None], {HANG}),
        (PAUSED, "sgp()", [0, 0], [STRATEGY | {"finite": False}, STRATEGY], {DIVERGED}),
        (NOT_FINITE, "cgx()", [0, 0], [SKIPPED, SKIPPED], set()),
        (NOT_FINITE, "cgx()", [0, 0], [SKIPPED, METHOD], {LOST}),
        (NOT_FINITE, "cgx()", [0, 0], [SKIPPED, SKIPPED | {"memory_kept": False}], {LOST}),
        (NOT_FINITE, "auto()", [0, 0], [SKIPPED, SKIPPED | {"memory_kept": False}], set()),
        (NOT_FINITE, "auto()", [0, 0], [SKIPPED, SKIPPED | {"parameters_kept": False}], {LOST}),
        (KILLED, "cgx()", [-9, 1], [None, None], set()),
        (KILLED, "cgx()", [-9, 0], [None, METHOD], {CODE}),
        (RAISED, "cgx()", [1, 1], [None, None], set()),
        (RAISED, "sgp()", [0, 0], [None, LEFT], {CODE}),
        (KILLED, "sgp()", [-9, 0], [None, LEFT], set()),
        (KILLED, "sgp()", [-9, 0], [None, None], {CODE}),
        (KILLED, "sgp()", [-9, 0], [None, STRATEGY], {LOST}),
        (KILLED, "sgp()", [-9, 0], [None, LEFT | {"steps": STEPS - 1}], {LOST}),
        (STOPPED, "sgp()", [0, 0], [STRATEGY | {"steps": 40}] * 2, set()),
        (STOPPED, "sgp()", [0, 0], [STRATEGY | {"steps": MOST_STEPS}] * 2, {LOST}),
        (STOPPED, "sgp()", [0, 1], [STRATEGY, None], {CODE}),
    ],
)
def test_each_check_fails_when_it_should(
    fault: str, spec: str, codes: list[int | None], results: list[Any], wrong: set[str]
) -> None:
    assert {*checks(fault, spec, ended(codes, results))} == wrong


def test_a_stop_that_nobody_noticed_has_cost_the_others_their_time() -> None:
    report = ended([0, 0], [STRATEGY, STRATEGY], noticed=False)
    assert {*checks(STOPPED, "sgp()", report)} == {LOST}
    assert not checks(PAUSED, "sgp()", report)


@pytest.mark.parametrize(
    ("fault", "changes"), [(KILLED, {"disturbed": False}), (RAISED, {"errors": ["another error", ""]})]
)
def test_a_fault_that_comes_too_late_is_no_result(fault: str, changes: dict[str, Any]) -> None:
    with pytest.raises(NotDisturbedError):
        checks(fault, "cgx()", ended([1, 1], [None, None], **changes))


def test_runs_are_the_same_in_every_call_and_have_keys_of_their_own() -> None:
    assert runs() == runs()
    assert len({run.key for run in runs()}) == len(runs()) >= 1000
