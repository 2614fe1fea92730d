"""Mutants against a suite: tests related to each first, and all others for those that survive.

A kill counts if its test fails again, alone, with the mutant, and passes without it: all tests that killed
one are run together for that. Another test, such as one that depends on time on a busy machine, is left out,
and its mutant is run again.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from . import results
from .related import related, test_files
from .results import Outcome
from .scratch import Scratch
from .table import Mutant

LEFT_OUT = ("soak", "nightly", "compiled")  # markers of tests that are no part of a suite
HANGS_S = 200  # a test that takes longer fails, where pytest-timeout is installed
LIMIT_S = 600  # for all tests that killed a mutant, without it
OUT_OF_TIME = 124  # exit status of timeout(1)
PASSED, FAILED, INTERRUPTED, NOTHING = 0, 1, 2, 5  # exit statuses of pytest; 2: an error in collection
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
SECONDS = re.compile(r" in ([\d.]+)s")


@dataclass(frozen=True)
class Run:
    """End of one pytest command: the tests that failed, seconds, and whether time ran out."""

    failed: tuple[str, ...]
    seconds: float
    timed_out: bool


@dataclass(frozen=True)
class Suite:
    """The tests of a copy.

    Args:
        name: Name of the suite in the results.
        commit: Commit of the tree that was copied.
        scratch: The copy.
        out: The results file.
        limit_s: Most seconds for one mutant.
        workers: Processes of pytest-xdist for the whole suite.
        under: Words of a command that each pytest is started with, such as `nice`.
        any_commit: Whether results of other commits count.
        related_only: Whether survivors of related tests are left to a later run.
    """

    name: str
    commit: str
    scratch: Scratch
    out: Path
    limit_s: float
    workers: int
    under: Sequence[str]
    any_commit: bool
    related_only: bool

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Bring the results of these mutants up to date; stored after each step."""
        for mutant in mutants:
            if self._known(mutant) is None:
                self._try(mutant, "related", Outcome.none(mutant, self.commit))
        self._confirm(mutants)
        for mutant in () if self.related_only else mutants:
            known = self._known(mutant)
            if known is not None and known.killed_by is None and known.stage == "related":
                self._try(mutant, "whole", known)
                self._confirm([mutant])

    @property
    def _markers(self) -> str:
        """Expression that leaves tests out, by those markers that the copy registers."""
        registered = (self.scratch.folder / "pyproject.toml").read_text()
        return " and ".join(f"not {name}" for name in LEFT_OUT if f'"{name}:' in registered)

    def _known(self, mutant: Mutant) -> Outcome | None:
        """Return the outcome of this mutant on this commit, None if there is none."""
        found = results.outcome(results.read(self.out), self.name, mutant)
        return found if found is None or self.any_commit or found.commit == self.commit else None

    def _try(self, mutant: Mutant, stage: str, before: Outcome) -> None:
        """Run one stage with a mutant, and store what comes of it."""
        folder, first = self.scratch.folder, related(self.scratch.folder, mutant)
        whole = stage == "whole"
        tests = [name for name in [*test_files(folder), "src"] if name not in first] if whole else first
        seconds, flaky, run = before.seconds, [*before.flaky], Run((), 0.0, True)
        with self.scratch.applied(mutant):
            while (left := self.limit_s - seconds) >= 1:
                tests = [name for name in tests if name not in flaky]  # files with an error in collection
                run = self._pytest(tests, left, flaky, stop=True, parallel=whole)
                seconds += run.seconds
                if not run.failed or self._pytest(run.failed[:1], LIMIT_S, ()).failed:
                    break
                print(f"{run.failed[0]} passes with {mutant.name}, alone", flush=True)
                flaky.append(run.failed[0])
                run = Run((), 0.0, True)
        found = replace(
            before,
            killed_by=next(iter(run.failed), None),
            confirmed=False,
            stage=stage,
            seconds=round(seconds, 1),
            timed_out=run.timed_out,
            flaky=(*flaky,),
        )
        results.store(self.out, self.name, mutant, found)
        print(f"{mutant.name}: {found.killed_by or 'survives'} ({stage}, {found.seconds} s)", flush=True)

    def _confirm(self, mutants: Sequence[Mutant]) -> None:
        """Make sure that the tests which killed these mutants pass without them."""
        while True:
            known = {mutant: self._known(mutant) for mutant in mutants}
            open_ = {
                mutant: each
                for mutant, each in known.items()
                if each and each.killed_by and not each.confirmed
            }
            if not open_:
                return
            tests = sorted({str(each.killed_by) for each in open_.values()})
            failed = self._pytest(tests, LIMIT_S, ()).failed
            for mutant, each in open_.items():
                if each.killed_by not in failed:
                    found = replace(each, confirmed=True)
                    results.store(self.out, self.name, mutant, found)
                else:
                    print(f"{each.killed_by} fails without {mutant.name} too", flush=True)
                    flaky = (*each.flaky, str(each.killed_by))
                    self._try(mutant, each.stage, replace(each, flaky=flaky))

    def _pytest(
        self,
        tests: Sequence[str],
        limit_s: float,
        left_out: Sequence[str],
        *,
        stop: bool = False,
        parallel: bool = False,
    ) -> Run:
        words = [*self.under, "timeout", "--kill-after=10", f"{limit_s:.0f}", str(self.scratch.python)]
        words += ["-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", self._markers]
        words += ["-x"] if stop else []
        if find_spec("pytest_timeout") is not None:
            words += ["--timeout", str(HANGS_S)]
        if parallel:
            words += ["-n", str(self.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        words += [word for name in left_out for word in ("--deselect", name)]
        began = time.perf_counter()
        done = subprocess.run(
            [*words, *tests],
            cwd=self.scratch.folder,
            env=self.scratch.environment(),
            capture_output=True,
            text=True,
        )
        counted = SECONDS.findall(done.stdout)
        seconds = float(counted[-1]) if counted else min(time.perf_counter() - began, limit_s)
        failed = tuple(SUMMARY.findall(done.stdout))
        if done.returncode == OUT_OF_TIME:
            return Run(failed, limit_s, True)
        if done.returncode in (PASSED, NOTHING) or (done.returncode in (FAILED, INTERRUPTED) and failed):
            return Run(failed, seconds, False)
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
