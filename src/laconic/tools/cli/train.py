"""`laconic train`: a built-in task with several methods and seeds."""

from __future__ import annotations

import sys

import typer

from laconic.core.errors import LaconicError
from laconic.tools.cli.cautions import cautions
from laconic.tools.cli.command import command
from laconic.tools.cli.console import console, errors
from laconic.tools.cli.ended import FAILED, INTERRUPTED, REFUSED, Ended, complain, show_report, to_resume
from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.session import Session
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.tasks.launcher import WorkerFailed


@command(Options)
def train(options: Options) -> None:
    """Train TASK with each method on several workers, and write runs/NAME/report.html.

    Baselines come first; all methods run with one seed before the next seed. Ctrl-C stops all workers at once
    and keeps all measurements. --resume continues each training from its last complete checkpoint.
    """
    settings = Settings.of(options)
    for line in cautions(settings):
        errors().print(f"laconic: {line}", style="yellow", markup=False)
    interrupts = Interrupts()
    session = Session(settings, console(), interrupts)
    ended: Ended | None = None
    try:
        with interrupts:
            session.train_all()
    except KeyboardInterrupt:
        ended = Ended("Interrupted: this report covers the measurements until then.", INTERRUPTED)
    except WorkerFailed as failure:
        ended = Ended(str(failure), FAILED, not failure.expected, failure.details)
    except LaconicError as error:
        ended = Ended(str(error), FAILED if session.started else REFUSED)
    if session.started:
        show_report(settings.folder, session.console, ended)
    if ended is not None:
        complain(ended, settings.folder, started=session.started)
        if ended.code == INTERRUPTED and session.started:
            session.console.print(
                to_resume(settings, sys.argv[1:]), style="yellow", markup=False, soft_wrap=True
            )
        raise typer.Exit(ended.code)
