"""End of `laconic train`: report, reason and resume command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from laconic.tools.cli.console import errors
from laconic.tools.cli.settings import Settings
from laconic.tools.cli.startup import INTERRUPTED as INTERRUPTED
from laconic.tools.cli.tables import print_summary
from laconic.tools.report import publish
from laconic.tools.report.ledger import EVENTS, read_events

FAILED = 1
REFUSED = 2  # rejected before the start


@dataclass(frozen=True)
class Ended:
    reason: str
    code: int
    fault: bool = False
    details: str = ""


def show_report(folder: Path, screen: Console, ended: Ended | None) -> None:
    if ended and ended.code == INTERRUPTED:
        screen.print(ended.reason, style="yellow", markup=False)
    if ended and not read_events(folder):
        return
    published = publish(folder, ended.reason if ended else None)
    print_summary(screen, published.rows, published.target)
    screen.print(f"\nreport: {published.report}", markup=False)


def complain(ended: Ended, folder: Path, *, started: bool) -> None:
    stderr = errors()
    if ended.code == INTERRUPTED:
        if not started:
            stderr.print("laconic: interrupted before it began: nothing was measured")
        return
    if ended.details:
        stderr.print(ended.details.rstrip(), markup=False)
    if ended.fault:
        stderr.print(f"all steps before this error are in {folder / EVENTS}", markup=False)
    stderr.print(f"laconic: {ended.reason}", style="bold red", markup=False)


def to_resume(settings: Settings, arguments: Sequence[str]) -> str:
    words = [word for word in arguments if word not in ("--overwrite", "--resume")]
    if not any(word.split("=")[0] == "--name" for word in words):
        words += ["--name", settings.name]
    from_ = "its last checkpoint" if settings.checkpoint_every else "its start, as there are no checkpoints"
    return (
        f"to resume: {shlex.join(['laconic', *words, '--resume'])}\n"
        f"finished trainings are kept; the interrupted one resumes from {from_}"
    )
