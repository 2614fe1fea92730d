"""Seed faults into a copy of the sources, one at a time, and report the test that catches each.

    python -m tests.mutants                                   all mutants, with the tests of this tree
    python -m tests.mutants --part 2/4                        the second quarter of them
    python -m tests.mutants --suite old --tree ../before      with the sources and tests of another tree
    python -m tests.mutants --only cli-patience --again       one mutant, though it has a result
    python -m tests.mutants --report --out tests/mutants/results.json      the table of stored results

For each mutant, tests related to its module run first, and the whole suite only if these pass: at most ten
minutes in all. A result is stored at once, and a mutant that has one of the same commit is not run again. The
exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import part_of

from . import results
from .run import Suite
from .scratch import Scratch
from .table import MUTANTS

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "mutants.json"


def main() -> int:
    options = _options()
    if options.report:
        print(results.table(results.read(options.out)))
        return 0
    first, parts = part_of(options.part)
    size = -(-len(MUTANTS) // parts)
    chosen = MUTANTS[first * size : (first + 1) * size]  # neighbours: one part builds the native module
    if options.only:
        chosen = tuple(mutant for mutant in MUTANTS if mutant.name in options.only)
    tree = options.tree.resolve()
    commit = _git(tree, "rev-parse", "HEAD") + (
        "+" if _git(tree, "status", "--porcelain", "src", "tests") else ""
    )
    if options.again:
        results.drop(options.out, options.suite, chosen)
    with tempfile.TemporaryDirectory(prefix="laconic-mutants-") as temporary:
        folder = Path(temporary if options.scratch is None else options.scratch).resolve()
        Suite(
            name=options.suite,
            commit=commit,
            scratch=Scratch(tree, folder),
            out=options.out,
            limit_s=60 * options.minutes,
            workers=options.workers,
            under=options.under.split(),
            any_commit=options.any_commit,
            related_only=options.related_only,
        ).run(chosen)
    known = results.read(options.out)
    outcomes = [results.outcome(known, options.suite, mutant) for mutant in chosen]
    return int(not all(each is not None and each.killed_by for each in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="which part of the mutants: 2/4 is the second quarter")
    parser.add_argument("--suite", default="lean", help="name of the suite in the results")
    parser.add_argument("--tree", type=Path, default=ROOT, help="tree whose sources and tests are copied")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants", metavar="NAME")
    parser.add_argument("--again", action="store_true", help="run mutants that have a result too")
    parser.add_argument("--any-commit", action="store_true", help="results of other commits count too")
    parser.add_argument("--related-only", action="store_true", help="leave survivors to a later run")
    parser.add_argument("--minutes", type=float, default=10, help="most minutes for one mutant")
    parser.add_argument("--workers", type=int, default=2, help="processes that run the whole suite")
    parser.add_argument("--under", default="", help="command that starts each pytest, such as 'nice -n 5'")
    parser.add_argument(
        "--scratch", type=Path, help="folder for the copy, which stays; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    parser.add_argument("--report", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    unknown = {*options.only} - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"--only: there is no mutant {min(unknown)}")
    return options


def _git(tree: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
