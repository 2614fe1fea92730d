"""Training loss of the long trainings by steps, bytes and seconds, for docs/own_rates.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.common.forecasts import LINKS
from benchmarks.common.results import Row
from benchmarks.own_rates import forecast
from benchmarks.own_rates.__main__ import runs
from benchmarks.own_rates.families import LONG_GPT, SEEDS
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

BY_BYTES, BY_TIME = "own_rates-gpt-bytes.svg", "own_rates-gpt-seconds.svg"
HEAD = f"Training loss, {LONG_GPT.steps:,} steps, first seed"
LEFT, RIGHT = 56, 482
WITH_WARM_UP = ("onebit_adam()", "sparse_adam()")


def trained() -> dict[str, Row]:
    """Return the row of the first seed at its own rate, by spec."""
    found = {spec: runs(spec, LONG_GPT).get(SEEDS[0]) for spec in LONG_GPT.specs}
    return {spec: row for spec, row in found.items() if row is not None}


def forecasts() -> dict[str, dict[str, float]]:
    """Return the forecast seconds of a step, by spec and link, if the file exists."""
    found: dict[str, dict[str, float]] = (
        json.loads(forecast.FILE.read_text())["step_s"] if forecast.FILE.exists() else {}
    )
    return found


def section() -> Iterator[str]:
    """Yield lines on the pictures, which come after the table of the family."""
    if trained():
        yield f"![Training loss by steps and by bytes]({BY_BYTES})"
        yield ""
        yield "The loss is the mean of the workers' own models on their own batches, of a text that they read"
        yield "many times; the table tests the mean model on other text."
        yield ""
        if forecasts():
            yield f"![Training loss by seconds]({BY_TIME})"
            yield ""
            yield "Seconds are forecast by `laconic plan` (`python -m benchmarks.own_rates.forecast`), for"
            yield "hosts whose only core does forward and backward as this machine does alone, without the"
            yield "optimiser's step. Methods with a warm-up are left out; by bytes, those of a warm-up are"
            yield "spread evenly over the training."
            yield ""


def pictures(folder: Path) -> dict[Path, Callable[[], str]]:
    """Return what draws the pictures, if there is something to draw."""
    if not trained():
        return {}
    drawn = {folder / BY_BYTES: by_bytes}
    return drawn | ({folder / BY_TIME: by_time} if forecasts() else {})


def by_bytes() -> str:
    """Draw the loss by steps, and by MB that a worker has sent, which are spread evenly over the steps."""
    rows = trained()
    steps = [curve(row, 1.0) for row in rows.values()]
    sent = [curve(row, row["sent_mb"] / LONG_GPT.steps) for row in rows.values()]
    panels = [
        panel(steps, LEFT, "by step", log_x=False),
        panel(sent, RIGHT, "by MB sent per worker", log_x=True),
    ]
    return framed("Training loss by steps and by bytes", HEAD, panels, [*rows])


def by_time() -> str:
    """Draw the loss by forecast seconds over two links."""
    seconds = forecasts()
    rows = {spec: row for spec, row in trained().items() if spec in seconds and spec not in WITH_WARM_UP}
    panels = [
        panel(
            [curve(row, seconds[spec][link]) for spec, row in rows.items()],
            left,
            f"by forecast seconds over {link}",
            log_x=True,
        )
        for left, link in zip((LEFT, RIGHT), LINKS[:2], strict=True)
    ]
    return framed("Training loss by seconds", HEAD, panels, [*rows])


def curve(row: Row, each: float) -> Curve:
    """Return the loss against steps, bytes or seconds. `each`: how many a step."""
    steps, losses = np.array(row["curve"]).T
    return Curve(each * steps, losses, np.zeros_like(losses))
