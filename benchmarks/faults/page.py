"""The table of docs/faults.md: disturbed runs by fault, and how many failed a check."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.tables import table
from benchmarks.faults.schedule import (
    BUSY,
    DISK,
    KILLED,
    LAUNCHER,
    LINK,
    NOT_FINITE,
    PAUSED,
    RAISED,
    RUNS,
    STOPPED,
    Run,
    runs,
)
from benchmarks.faults.verdicts import CHECKS, DIVERGED, LOST
from benchmarks.faults.wires import PARTS

WHAT = {
    KILLED: "a rank is killed by SIGKILL",
    RAISED: "a rank's script raises an exception",
    STOPPED: "a rank is stopped by SIGSTOP until the others continue without it, and later continued",
    PAUSED: "a rank is stopped for 0.2 to 3 s",
    NOT_FINITE: "a gradient is infinite in one place on one rank",
    BUSY: "four other processes compute all the time",
    LINK: "the link of one of three hosts is down for 1, 7 or 30 s",
    DISK: "the disk has room for a part of the checkpoints; then it has more, and the run resumes",
    LAUNCHER: "`laconic train` is killed by SIGKILL, and resumes",
}
HEADS = ("what happens", "under", "runs", "hangs", *CHECKS[1:])
ENDS = (DIVERGED, LOST)  # checked on ranks that finish the training
UNCHECKED = {
    (KILLED, "a method"): ENDS,  # all ranks end with an error
    (RAISED, "a method"): ENDS,
    (DISK, "both"): (DIVERGED,),  # each rank is compared with an undisturbed run instead
    (LAUNCHER, "both"): (DIVERGED,),
}


def block() -> str:
    """Return a row for each fault and kind of spec, and their sum."""
    scheduled = runs()
    kinds = {(run.fault, under(run)): [] for run in scheduled}
    for run in scheduled:
        row = RUNS.get(run.key)
        if row is not None:
            kinds[run.fault, under(run)].append(row["wrong"])
    rows = [
        [WHAT[fault], kind, *counts(kinds[fault, kind], UNCHECKED.get((fault, kind), ()))]
        for fault in WHAT
        for kind in ("a strategy", "a method", "both")
        if (fault, kind) in kinds
    ]
    done = [wrong for each in kinds.values() for wrong in each]
    rows.append(["all", "", *counts(done)])
    return "\n".join(
        [
            *table(HEADS, rows),
            "",
            f"{len(done):,} of {len(scheduled):,} runs are done. A run that fails is repeated once its"
            " cause is fixed, and runs of changed code are repeated too: the last result counts.",
            *failures(scheduled),
            "",
            wires(),
        ]
    )


def wires() -> str:
    """Return a sentence on the damaged wires."""
    parts = PARTS.rows()
    if not parts:
        return "No damaged wires were counted yet: `python -m benchmarks.faults.wires`."
    count, sanitized = (
        sum(part["wires"] for part in parts if part["sanitized"] >= only) for only in (False, True)
    )
    kernels = min((part["implementations"] for part in parts), key=len)
    return (
        f"{count:,} damaged wires, each through at least {len(kernels)} implementations of the kernels"
        f" ({', '.join(kernels)}), {sanitized:,} of them under AddressSanitizer: each was"
        " refused by all, or gave the same finite tensor in all; none crashed"
        " (`python -m benchmarks.faults.wires`)."
    )


def failures(scheduled: list[Run]) -> Iterator[str]:
    """Yield the failed checks of each run that has some."""
    for run in scheduled:
        row = RUNS.get(run.key)
        for check, detail in ({} if row is None else row["wrong"]).items():
            yield f"- `{run.spec}`, {run.fault}, {check}: {detail}"


def under(run: Run) -> str:
    """Return what kind of spec the run has."""
    if run.fault in (DISK, LAUNCHER):
        return "both"
    return "a strategy" if run.strategy else "a method"


def counts(wrongs: list[dict[str, str]], unchecked: tuple[str, ...] = ()) -> list[str]:
    """Return the number of runs, and how many of them failed each check; "-" if it was not checked."""
    failed = {check: sum(check in wrong for wrong in wrongs) for check in CHECKS}
    return [f"{len(wrongs):,}", *("-" if check in unchecked else str(failed[check]) for check in CHECKS)]
