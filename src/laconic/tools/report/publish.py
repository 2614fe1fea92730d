"""Summary, picture and page of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laconic.core.extras import require
from laconic.tools.report.html import write_report
from laconic.tools.report.picture import write_picture
from laconic.tools.report.reaching import target_of
from laconic.tools.report.series import read_run
from laconic.tools.report.summary import Row, summarise, write_summary


@dataclass(frozen=True)
class Published:
    rows: list[Row]
    report: Path
    target: float | None


def check_packages() -> None:
    require("plotly", "report.html")
    require("tensorboard", "the scalars of a run")


def publish(folder: Path, interrupted: str | None = None) -> Published:
    run = read_run(folder)
    rows = summarise(run)
    write_summary(folder, run, rows, interrupted)
    write_picture(folder, run)
    return Published(rows, write_report(folder, run, rows, interrupted), target_of(run.config))
