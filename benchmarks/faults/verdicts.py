"""Checks of a disturbed run: no hang, equal replicas, no lost state, the right exit codes."""

from __future__ import annotations

import signal
from typing import Any

from benchmarks.faults.schedule import BUSY, KILLED, NOT_FINITE, PAUSED, RAISED, STOPPED, Run

HANG, DIVERGED, LOST, CODE = "hang", "diverged replicas", "lost state", "wrong exit code"
CHECKS = (HANG, DIVERGED, LOST, CODE)
ON_PURPOSE = "raised on purpose"
# They choose by measured times: no two runs have equal bits. A switch between two steps gives momentum back
# to SGD, even if the second step is skipped.
BY_TIME = ("auto(", "autotune(")


class NotDisturbedError(Exception):
    """The training was over before the fault."""


def compares_bits(run: Run) -> bool:
    """Return whether the run has to end with the bits of an undisturbed one."""
    return not run.strategy and run.fault in (PAUSED, BUSY) and not run.spec.startswith(BY_TIME)


def failed_checks(run: Run, ended: dict[str, Any], clean: str, steps: int, most_steps: int) -> dict[str, str]:
    """Return the failed checks of a run of ranks, with details.

    `ended`: as from `player.play`. `clean`: fingerprint of the model after an undisturbed run, if
    `compares_bits`. `steps`: steps of a whole training. `most_steps`: those of a rank that gives up.

    Raises:
        NotDisturbedError: The fault came too late.
    """
    codes, results = ended["codes"], ended["results"]
    if None in codes:
        return {HANG: f"ranks {[rank for rank, code in enumerate(codes) if code is None]}"}
    raised = run.fault != RAISED or ON_PURPOSE in ended["errors"][run.victim]
    if not (ended["disturbed"] and raised):
        raise NotDisturbedError
    expected = _codes(run)
    if codes != expected:
        return {CODE: f"{codes} instead of {expected}"}
    ends = [results[rank] for rank, code in enumerate(codes) if code == 0]
    if None in ends:
        return {CODE: "0 without a result"}
    found = {}
    if len({each["model"] for each in ends}) > 1 or not all(each["finite"] for each in ends):
        found[DIVERGED] = str([(each["model"][:8], each["finite"]) for each in ends])
    if run.strategy:
        lost = _lost_by_strategy(run, ends, ended["noticed"], steps, most_steps)
    else:
        lost = _lost_by_method(run, ends, clean)
    if lost:
        found[LOST] = lost
    return found


def _codes(run: Run) -> list[int]:
    """Return the expected exit codes."""
    victim = {KILLED: -signal.SIGKILL, RAISED: 1}.get(run.fault, 0)
    others = 1 if victim and not run.strategy else 0
    return [int(victim if rank == run.victim else others) for rank in range(run.size)]


def _lost_by_method(run: Run, ends: list[dict[str, Any]], clean: str) -> str:
    """Return which state ranks under a method have lost, or an empty string."""
    expected = [run.at] if run.fault == NOT_FINITE else []
    if any(each["skipped"] != expected for each in ends):
        return f"skipped {[each['skipped'] for each in ends]} instead of {expected}"
    if not all(each["parameters_kept"] for each in ends):
        return "the skipped step changed parameters"
    if not run.spec.startswith(BY_TIME) and not all(each["memory_kept"] for each in ends):
        return "the skipped step changed memory"
    if compares_bits(run) and any(each["model"] != clean for each in ends):
        return "other bits than after an undisturbed run"
    return ""


def _lost_by_strategy(
    run: Run, ends: list[dict[str, Any]], noticed: bool, steps: int, most_steps: int
) -> str:
    """Return which state ranks under a strategy have lost, or an empty string."""
    gone = run.fault in (KILLED, RAISED)
    living = [rank for rank in range(run.size) if not gone or rank != run.victim]
    if any(each["living"] != living for each in ends):
        return f"living {[each['living'] for each in ends]} instead of {living}"
    counts = {each["steps"] for each in ends}
    if run.fault == STOPPED and not noticed:
        return "the others did not continue without the stopped rank"
    whole = max(counts) < most_steps if run.fault == STOPPED else counts == {steps}
    return "" if whole and len(counts) == 1 else f"ended after {sorted(counts)} steps"
