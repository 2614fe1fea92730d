"""The blocks of docs/replicator.md: the example script, and what one slow worker costs."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table
from benchmarks.replicator.__main__ import ASYNC, DEPLOYMENTS, RUNS, SLEEP_S, SYNC, TWICE, WORKERS
from benchmarks.straggler.page import aim

SCRIPT = Path(__file__).parents[2] / "examples" / "replicator.py"
BANDS = ((0, 0), (1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))  # of staleness
Row = dict[str, Any]


def script() -> str:
    """The example without its docstring."""
    text = re.sub(r'^""".*?"""\n+', "", SCRIPT.read_text(), flags=re.DOTALL)
    return f"```python\n{text.rstrip()}\n```"


def block() -> str:
    """The table, the histogram and the goal; or how to measure them."""
    return written(RUNS.rows())


def written(rows: Sequence[Row]) -> str:
    """The block of these runs."""
    asleep = {spec: chosen(rows, spec, SLEEP_S) for spec in DEPLOYMENTS}
    if not all(asleep.values()):
        return "Not measured yet: `python -m benchmarks.replicator`."
    case, machine = asleep[SYNC][0]["case"], asleep[SYNC][0]["machine"]
    base = seconds(asleep[SYNC])
    times = base / seconds(asleep[ASYNC])
    lines = [
        f"`python -m benchmarks.replicator` on {machine['cores']} cores, {WORKERS} workers: the last one"
        f" sleeps {1e3 * SLEEP_S:.0f} ms before {100 * case['share']:.0f} % of its steps. Seconds until"
        f" {case['gradients']} gradients of one worker's batch have been applied; `sync` applies"
        f" {WORKERS} per update; medians of {len(asleep[SYNC])} runs. The loss is on held-out examples, by"
        " SGD at one learning rate for all. `sync` makes one step with the mean of 4 gradients and a server"
        " makes four, so losses are not comparable.",
        "",
        *table(
            ("deployment", "awake, s", "asleep, s", "vs. sync, asleep", "refused", "held-out loss"),
            [cells(rows, spec, base) for spec in DEPLOYMENTS],
        ),
        "",
        *table(
            ("goal", "measured", "met"),
            [aim(f"`async` at least {TWICE} times faster than `sync`", times, times >= TWICE)],
        ),
        "",
        f"Staleness of the gradients that `{ASYNC}` applied while one worker slept:",
        "",
        *table(("updates of others in between", "share of gradients, %"), histogram(asleep[ASYNC])),
    ]
    return "\n".join(lines)


def chosen(rows: Sequence[Row], spec: str, sleep_s: float) -> list[Row]:
    """The runs of one deployment, with or without sleep."""
    return [row for row in rows if (row["case"]["spec"], row["case"]["sleep_s"]) == (spec, sleep_s)]


def seconds(rows: Sequence[Row]) -> float:
    """Median over runs."""
    return statistics.median(row["seconds"] for row in rows)


def cells(rows: Sequence[Row], spec: str, base: float) -> tuple[str, ...]:
    """A row of the table. `base`: seconds of `sync` beside the sleeping worker."""
    awake, asleep = chosen(rows, spec, 0.0), chosen(rows, spec, SLEEP_S)
    refused = statistics.median(row["refused"] for row in asleep)
    return (
        f"`{spec}`",
        f"{seconds(awake):.1f}" if awake else "-",
        f"{seconds(asleep):.1f}",
        f"{base / seconds(asleep):.1f} times faster",
        f"{refused:.0f}",
        f"{statistics.median(row['loss'] for row in asleep):.3f}",
    )


def histogram(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """A row for each band of staleness, over all runs."""
    counts = Counter[int]()
    for row in rows:
        counts.update({int(key): count for key, count in row["staleness"].items()})
    total = sum(counts.values())
    return [
        (
            f"{low}" if low == high else f"{low} to {high}",
            f"{100 * sum(n for key, n in counts.items() if low <= key <= high) / total:.1f}",
        )
        for low, high in BANDS
    ]
