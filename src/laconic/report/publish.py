"""From a run's events to all that is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laconic.report.html import write_report
from laconic.report.picture import write_picture
from laconic.report.series import read_run
from laconic.report.summary import Row, summarise, write_summary


@dataclass(frozen=True)
class Published:
    """The table's rows and the page's path."""

    rows: list[Row]
    report: Path


def publish(folder: Path, interrupted: str | None = None) -> Published:
    """Read a run's folder and write `summary.json`, `loss.svg` and `report.html`; works on half a run too."""
    run = read_run(folder)
    rows = summarise(run)
    write_summary(folder, run, rows, interrupted)
    write_picture(folder, run)
    return Published(rows, write_report(folder, run, rows, interrupted))
