"""docs/scaling.md and its picture: from benchmarks/scaling/results.json, and through_servers.json."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.common.results import read
from benchmarks.common.tables import table
from benchmarks.scaling.__main__ import FEW, LEAST, MANY, MOST
from benchmarks.through_servers import page as through_servers
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import HEIGHT, WIDTH, legend, panel, style

Rows = list[dict[str, Any]]


def page() -> str:
    """The whole page."""
    found = read("scaling")
    sizes = sorted({row["workers"] for row in found["traffic"]})
    lines = [
        "# The cost of a step by number of workers",
        "",
        f"{found['entries']:,} entries with ResNet-50's proportions, density {found['density']:g},",
        f"mean of {found['steps']} steps after the first {found['first']}, for the worker with the highest"
        " cost. `make docs` writes",
        "this page from the results of `python -m benchmarks.scaling`.",
        "",
        "![traffic and selection by workers](scaling.svg)",
        "",
        "## Sent per worker and step, kB",
        "",
        "Every copy of a message, without packet headers; as much is received. Growth: from 4 workers to",
        "64; an all-reduce grows by 1.31, in proportion to (N-1)/N. Changed: share of the entries that a",
        "step changes, with 64 workers.",
        "",
        *table(
            ("method", *(f"{size}" for size in sizes), "growth", "changed, %"),
            [traffic_cells(rows, sizes) for rows in by_method(found["traffic"])],
        ),
        "",
        *through_servers.section(),
        "",
        "## Time of one worker to select, ms",
        "",
        "ResNet-50's 25.6 million entries, one thread. CGX sends all entries: the time is that of encoding.",
        "",
        *table(
            ("method", *(f"{size}" for size in sizes), "1 to 16"),
            [time_cells(rows, sizes) for rows in by_method(found["selecting"])],
        ),
        "",
        "## Goals",
        "",
        *table(("goal", "measured", "met"), bars(found)),
        "",
        "## Threads and processes",
        "",
        "Ranks are threads of one process here. Processes on gloo, on the same two cores, send the same",
        "bytes:",
        "",
        *table(
            ("method", "workers", "sent, kB, threads", "sent, kB, processes", "ms per step, processes"),
            [process_cells(row) for row in found["traffic"] if "process_sent" in row],
        ),
    ]
    return "\n".join(lines) + "\n"


def bars(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Each goal, what was measured, and whether it is met."""
    traffic = {rows[0]["name"]: growth(rows) for rows in by_method(found["traffic"])}
    seconds = {row["workers"]: row["seconds"] for row in found["selecting"] if row["name"] == "DEFT"}
    aims = [
        (
            f"{name}: traffic grows by a factor of at most {MOST:g} from {FEW} to {MANY} workers",
            f"{traffic[name]:.2f}",
            met((traffic[name] or math.inf) <= MOST),
        )
        for name in ("DEFT", "Ok-Topk")
    ]
    less = seconds[1] / seconds[16]
    select = f"DEFT: 16 workers select at least {LEAST} times faster than one"
    return [*aims, (select, f"{less:.1f} times", met(less >= LEAST))]


def met(is_met: bool) -> str:
    """A cell."""
    return "yes" if is_met else "**no**"


def growth(rows: Rows) -> float | None:
    """Traffic of a worker with MANY workers relative to FEW; None if not measured."""
    by_size = {row["workers"]: row["sent"] for row in rows}
    return by_size[MANY] / by_size[FEW] if MANY in by_size and FEW in by_size else None


def traffic_cells(rows: Rows, sizes: list[int]) -> tuple[str, ...]:
    """Bytes of one method by number of workers."""
    by_size = {row["workers"]: row for row in rows}
    cells = [f"{by_size[size]['sent'] / 1e3:,.1f}" if size in by_size else "" for size in sizes]
    grown = growth(rows)
    changed = f"{100 * by_size[MANY]['realised']:.2f}" if MANY in by_size else ""
    return (f"`{rows[0]['spec']}`", *cells, "" if grown is None else f"{grown:.2f}", changed)


def time_cells(rows: Rows, sizes: list[int]) -> tuple[str, ...]:
    """Milliseconds of one method by number of workers, and how much less 16 workers take than one."""
    by_size = {row["workers"]: 1e3 * row["seconds"] for row in rows}
    less = f"{by_size[1] / by_size[16]:.1f} times less"
    return (rows[0]["name"], *(f"{by_size[size]:.2f}" for size in sizes), less)


def process_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Threads compared with processes."""
    kilobytes = (f"{row[key] / 1e3:,.1f}" for key in ("sent", "process_sent"))
    return (f"`{row['spec']}`", str(row["workers"]), *kilobytes, f"{1e3 * row['process_s']:.0f}")


def by_method(rows: Rows) -> list[Rows]:
    """Rows grouped by method."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row["name"])]


def picture() -> str:
    """The SVG document: bytes and seconds over workers."""
    found = read("scaling")
    traffic, times = by_method(found["traffic"]), by_method(found["selecting"])
    names = [rows[0]["name"] for rows in traffic]
    sent = [curve([(row["workers"], row["sent"] / 1e6) for row in rows]) for rows in traffic]
    timed = {
        rows[0]["name"]: curve([(row["workers"], 1e3 * row["seconds"]) for row in rows]) for rows in times
    }
    nothing = curve([])
    title = f"A worker's step at density {found['density']:g}, by number of workers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Bytes sent, and time to select, by workers: {escape(title)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(title)}</text>',
        panel(sent, 56, "MB sent, by workers", log_x=True),
        panel([timed.get(name, nothing) for name in names], 482, "ms to select, by workers", log_x=True),
        legend(names),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def curve(points: list[tuple[float, float]]) -> Curve:
    """A line through these points."""
    x, y = (np.array([point[axis] for point in points], dtype=float) for axis in (0, 1))
    return Curve(x, y, np.zeros_like(x))
