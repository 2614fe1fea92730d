"""Results file of the mutation tests: machine, versions, and what each suite does with each mutant."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .table import MUTANTS, Mutant


@dataclass(frozen=True)
class Outcome:
    """What a suite does with a mutant.

    `killed_by` is the first test that fails with the mutant, also alone, None for a survivor; `confirmed`
    says that it passes without the mutant. `stage` is "related" or "whole"; `seconds` are those of all
    stages, as pytest counts them; `timed_out` says that time ran out before the last was done; `flaky` are
    tests that do not count. `commit` is that of the copied tree, with a "+" after changes to it.
    """

    killed_by: str | None
    confirmed: bool
    stage: str
    seconds: float
    timed_out: bool
    flaky: tuple[str, ...]
    digest: str
    commit: str

    @classmethod
    def none(cls, mutant: Mutant, commit: str) -> Outcome:
        """Return the outcome before any test."""
        return cls(None, False, "", 0.0, False, (), digest_of(mutant), commit)


def digest_of(mutant: Mutant) -> str:
    """Return a short name of a mutant's fault: with another one, its results do not count."""
    return hashlib.sha256("\0".join([mutant.file, mutant.old, mutant.new]).encode()).hexdigest()[:12]


def read(path: Path) -> dict[str, Any]:
    """Return the results so far, {"suites": {suite: {"machine", "mutants"}}}."""
    return json.loads(path.read_text()) if path.exists() else {"suites": {}}


def store(path: Path, suite: str, mutant: Mutant, found: Outcome) -> None:
    """Add one outcome."""
    with _changed(path) as known:
        place = known["suites"].setdefault(suite, {"mutants": {}})
        place["machine"] = machine()
        outcomes = {**place["mutants"], mutant.name: asdict(found)}
        place["mutants"] = {each.name: outcomes[each.name] for each in MUTANTS if each.name in outcomes}


def drop(path: Path, suite: str, mutants: Sequence[Mutant]) -> None:
    """Forget the outcomes of these mutants."""
    with _changed(path) as known:
        for mutant in mutants:
            known["suites"].get(suite, {"mutants": {}})["mutants"].pop(mutant.name, None)


@contextmanager
def _changed(path: Path) -> Iterator[dict[str, Any]]:
    """Write the results after changes to them. Several parts may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = read(path)
        yield known
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(known, indent=1) + "\n")
        beside.replace(path)
    finally:
        os.close(folder)


def machine() -> dict[str, str | int | None]:
    """Return the machine and the versions that times depend on."""
    versions = {name: version(name) for name in ("torch", "pytest")}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def outcome(found: Mapping[str, Any], suite: str, mutant: Mutant) -> Outcome | None:
    """Return the outcome of this mutant as it is now, None if there is none."""
    known = found["suites"].get(suite, {"mutants": {}})["mutants"].get(mutant.name)
    if known is None or known["digest"] != digest_of(mutant):
        return None
    return Outcome(**{**known, "flaky": tuple(known["flaky"])})


def table(found: Mapping[str, Any], mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Return a Markdown table of all suites."""
    suites = [*found["suites"]]
    lines = [f"| mutant | fault | {' | '.join(suites)} |", "|---|---|" + "---|" * len(suites)]
    for mutant in mutants:
        cells = [_cell(found["suites"][suite]["mutants"].get(mutant.name)) for suite in suites]
        lines.append(f"| `{mutant.file}` | {mutant.fault} | {' | '.join(cells)} |")
    counts = []
    for suite in suites:
        known = found["suites"][suite]["mutants"].values()
        counts.append(f"{sum(each['killed_by'] is not None for each in known)} of {len(known)} killed")
    return "\n".join([*lines, f"| all | | {' | '.join(counts)} |"])


def _cell(outcome: Mapping[str, Any] | None) -> str:
    if outcome is None:
        return "not run"
    if outcome["killed_by"] is None:
        how = ", out of time" if outcome["timed_out"] else ""
        return f"**survives** ({outcome['stage']}{how}), {outcome['seconds']:.0f} s"
    return f"`{outcome['killed_by'].removeprefix('tests/')}`, {outcome['seconds']:.0f} s"
