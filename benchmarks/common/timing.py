"""Times of calls relative to one of them, and a table of which meet their bars.

Machines are noisy and shared, so times are CPU time of the one thread that works: this excludes others' use
of the core, but not of the memory bus. In every round each call is timed once; the figure is the median
over rounds of the ratio inside a round, and the ratio of the minimum times is shown too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FRESH = 3  # rounds in which results land on pages that the process has never touched
Call = Callable[[], object]
Row = tuple[str, str, float, float | None, str]  # name, unit, figure, bar, detail


def rounds(calls: dict[str, Call], count: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, all calls in turn; the first `FRESH` rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(FRESH + count):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if number >= FRESH:
                times[name].append(time.thread_time() - start)
    return times


def ratio(
    times: dict[str, list[float]], name: str, to: str, bar: float | None
) -> tuple[float, float | None, str]:
    """The end of a row: median over rounds of time / time of `to`; the bar; the same of the least times."""
    median = statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))
    least = min(times[name])
    return median, bar, f"least {least / min(times[to]):.2f}, {1e3 * least:.1f} ms"


def holds(figure: float, bar: float | None) -> bool | None:
    """A bar is the most a figure may be; a negative one is the least."""
    if bar is None:
        return None
    return figure <= bar if bar > 0 else figure >= -bar


def show(title: str, rows: list[Row]) -> None:
    """Print the rows, with their bars."""
    table = Table(title=title)
    for column in ("what", "figure", "unit", "bar", "holds", "detail"):
        table.add_column(column)
    for what, unit, figure, bar, detail in rows:
        limit = "" if bar is None else f"<= {bar:g}" if bar > 0 else f">= {-bar:g}"
        good = {None: "", True: "yes", False: "NO"}[holds(figure, bar)]
        table.add_row(what, f"{figure:.3g}", unit, limit, good, detail)
    Console(width=130).print(table)


def save(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write the rows, and what they were measured on, as JSON."""
    figures = [
        {"what": what.strip(), "figure": round(figure, 4), "unit": unit, "bar": bar, "detail": detail}
        for what, unit, figure, bar, detail in rows
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": about, "figures": figures}, indent=1) + "\n")
