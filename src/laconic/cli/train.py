"""`laconic train`: a built-in task by several methods and seeds, a live table, and a report at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from laconic.cli.console import console, errors
from laconic.cli.interrupts import Interrupts
from laconic.cli.session import Session
from laconic.cli.settings import Settings
from laconic.cli.tables import print_summary
from laconic.core.errors import LaconicError
from laconic.report import publish
from laconic.report.ledger import EVENTS, read_events
from laconic.tasks.launcher import WorkerFailed

INTERRUPTED = 130  # exit codes: of a run that Ctrl-C has ended,
FAILED = 1  # of one that failed,
REFUSED = 2  # and of one that was never begun


@dataclass(frozen=True)
class Ended:
    """Why a run ended before its last step. `fault`: nobody expected it; `details`: a worker's traceback."""

    reason: str
    code: int
    fault: bool = False
    details: str = ""


def train(
    task: Annotated[str, typer.Argument(help="digits, mnist, cifar10 or shakespeare")],
    workers: Annotated[int, typer.Option(help="processes, on this machine")] = 2,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with", help='a method, "dgc(density=0.01)", or a strategy, "local_sgd()"; may be repeated'
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="a baseline to compare with; may be repeated, the first gives ratios"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="how many times each method is trained, from --seed on")] = 1,
    seed: Annotated[int, typer.Option(help="the first seed")] = 0,
    steps: Annotated[int | None, typer.Option(help="steps of each training [default: the task's]")] = None,
    batch: Annotated[
        int | None, typer.Option(help="examples a worker and step [default: the task's]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="highest learning rate [default: the usual one]")] = None,
    skew: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA",
            help="each worker draws from examples of its own, with a share of each label from"
            " Dirichlet(ALPHA): 0.1 is much skew, 100 hardly any; of a text, a share of each tenth"
            " [default: all workers draw from all examples]",
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="2 to 8: every method trains the model with layers of so many bits, simulated"
            " [default: float32]"
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="strategies go on when a worker is killed, or silent for so long; methods need all workers"
            " [default: a lost worker ends the run]",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            help="with --patience: so many killed workers are started anew, and take the others' model"
        ),
    ] = 0,
    model: Annotated[str | None, typer.Option(help="one of the task's models [default: its first]")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the data set [default: $LACONIC_DATA]")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="the run's folder in it [default: task and time]")] = None,
    eval_every: Annotated[int | None, typer.Option(help="steps between tests [default: a tenth]")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="steps between checkpoints; 0: none")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run of this --name")] = False,
) -> None:
    """Train TASK by each method on several workers, and write runs/NAME/report.html.

    Baselines are trained first, all methods with one seed before the next seed. Ctrl-C ends all workers at
    once and keeps what was measured; --resume goes on from the last complete checkpoint of each training.
    """
    settings = Settings.of(
        task=task,
        model=model,
        methods=tuple(with_ or ()),
        against=tuple(against or ()),
        workers=workers,
        seeds=seeds,
        seed=seed,
        steps=steps,
        batch=batch,
        lr=lr,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        data=data,
        out=out,
        name=name,
        resume=resume,
        skew=skew,
        bits=bits,
        patience=patience,
        restarts=restarts,
    )
    for line in settings.warnings():
        errors().print(f"laconic: {line}", style="yellow", markup=False)
    interrupts = Interrupts()
    session = Session(settings, console(), interrupts)
    ended: Ended | None = None
    try:
        with interrupts:
            session.train_all()
    except KeyboardInterrupt:
        ended = Ended("Interrupted: this report holds what was measured until then.", INTERRUPTED)
    except WorkerFailed as failure:
        ended = Ended(str(failure), FAILED, not failure.expected, failure.details)
    except LaconicError as error:
        ended = Ended(str(error), FAILED if session.began else REFUSED)
    if session.began:
        _publish(settings.folder, session.console, ended)
    if ended is not None:
        _complain(ended, settings.folder)
        raise typer.Exit(ended.code)


def _publish(folder: Path, screen: Console, ended: Ended | None) -> None:
    """Write and show what was measured; nothing where no step was done."""
    if ended and ended.code == INTERRUPTED:
        screen.print(ended.reason, style="yellow", markup=False)
    if ended and not read_events(folder):
        return
    published = publish(folder, ended.reason if ended else None)
    print_summary(screen, published.rows)
    screen.print(f"\nreport: {published.report}", markup=False)


def _complain(ended: Ended, folder: Path) -> None:
    """The reason as the last line of standard error, after a traceback where it is a fault."""
    if ended.code == INTERRUPTED:
        return
    complaints = errors()
    if ended.details:
        complaints.print(ended.details.rstrip(), markup=False)
    if ended.fault:
        complaints.print(f"every step until then is in {folder / EVENTS}", markup=False)
    complaints.print(f"laconic: {ended.reason}", style="bold red", markup=False)
