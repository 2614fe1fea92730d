"""Accuracy against bytes of methods at several densities, for docs/own_rates.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.own_rates.__main__ import runs
from benchmarks.own_rates.families import LOCAL_MOMENTUM
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

PICTURE = "own_rates-densities.svg"
METHODS = ("topk", "dgc", "deft")


def points(method: str) -> list[tuple[float, float, float]]:
    """Return MB per worker, mean accuracy in percent and its standard error, by density."""
    found = []
    for spec in LOCAL_MOMENTUM.specs:
        its = [*runs(spec, LOCAL_MOMENTUM).values()]
        if re.match(rf"{method}\(density=", spec) and its:
            accuracies = [100 * row["accuracy"] for row in its]
            error = statistics.stdev(accuracies) / len(its) ** 0.5 if len(its) > 1 else 0.0
            mb = statistics.mean(row["sent_mb"] for row in its)
            found.append((mb, statistics.mean(accuracies), error))
    return sorted(found)


def drawn() -> list[str]:
    """Return the methods with at least two densities."""
    return [method for method in METHODS if len(points(method)) > 1]


def section() -> Iterator[str]:
    """Yield lines on the picture, which come after the table of the family."""
    if drawn():
        yield f"![Accuracy against bytes of {', '.join(drawn())}]({PICTURE})"
        yield ""
        yield "By MB that a worker sends. Workers of `topk` and `dgc` choose different entries: more of them"
        yield "change than with `deft` of the same density."
        yield ""


def pictures(folder: Path) -> dict[Path, Callable[[], str]]:
    """Return what draws the picture, if there is something to draw."""
    return {folder / PICTURE: picture} if drawn() else {}


def picture() -> str:
    """Draw accuracy against bytes, one line per method, and dense training's accuracy."""
    curves = [Curve(*map(np.array, zip(*points(method), strict=True))) for method in drawn()]
    dense = statistics.mean(
        100 * row["accuracy"] for row in runs(LOCAL_MOMENTUM.baseline, LOCAL_MOMENTUM).values()
    )
    panels = [panel(curves, 56, "by MB sent per worker", log_x=True, log_y=False, mark=round(dense, 1))]
    head = f"Test accuracy, %, after {LOCAL_MOMENTUM.steps:,} steps; dotted: dense training"
    return framed("Accuracy against bytes by density", head, panels, drawn())
