"""`laconic train`: a built-in task with several methods and seeds, a live table, and a report at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from laconic.core.errors import LaconicError
from laconic.tools.cli.cautions import cautions
from laconic.tools.cli.console import console, errors
from laconic.tools.cli.ended import FAILED, INTERRUPTED, REFUSED, Ended, complain, show_report, to_resume
from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.pipelining import PipelineOptions
from laconic.tools.cli.presets import BRIEFLY
from laconic.tools.cli.session import Session
from laconic.tools.cli.settings import Settings
from laconic.tools.tasks.launcher import WorkerFailed

# headings of --help
SMALL = "Few bits, few weights, little memory"
LARGE = "Large batches"
LOST = "Lost workers"
STAGES = "Pipelines"


def train(
    task: Annotated[str, typer.Argument(help="digits, mnist, cifar10 or shakespeare")],
    workers: Annotated[
        int | None,
        typer.Option(help="number of processes on this machine [default: 2, or stages times replicas]"),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help=f"a method or strategy; may be repeated: {BRIEFLY}"),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="a baseline; may be repeated; ratios compare with the first"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="trainings per method, with seeds from --seed upwards")] = 1,
    seed: Annotated[int, typer.Option(help="the first seed")] = 0,
    steps: Annotated[int | None, typer.Option(help="steps per training [default: the task's]")] = None,
    batch: Annotated[
        int | None, typer.Option(help="batch size per worker, or per replica [default: the task's]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="peak learning rate [default: by optimiser]")] = None,
    skew: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA",
            help="each worker has its own examples, with shares of each label drawn from"
            " Dirichlet(ALPHA): 0.1 skews strongly, 100 hardly at all; for text, shares of each tenth"
            " of it [default: all workers draw from all examples]",
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=SMALL,
            help="train the model with layers of 2 to 8 bits, simulated [default: float32]",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            rich_help_panel=SMALL,
            help="of forward and backward: fp32, bf16 or fp16, by autocast; fp16 with loss scaling",
        ),
    ] = "fp32",
    recipe: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LARGE,
            help="settings for large batches: lamb, lars or sgd, with a rate scaled from the task's batch to"
            " --batch, gradual warm-up and polynomial decay [default: the task's own]",
        ),
    ] = None,
    copies: Annotated[
        int,
        typer.Option(
            rich_help_panel=LARGE, help="batch augmentation: independent augmentations of each example"
        ),
    ] = 1,
    across: Annotated[
        str,
        typer.Option(
            rich_help_panel=LARGE,
            help="where copies are: 'ranks', where groups of workers draw the same examples, or 'batch'",
        ),
    ] = "ranks",
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=LARGE, help="most examples in a forward pass [default: all; with --recipe 256]"
        ),
    ] = None,
    lowbit: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SMALL,
            metavar="SPEC",
            help="train towards weights of a few bits: \"admm(table='ternary')\", or with few bits in"
            ' products: "binarise()", for model bnn of mnist and cifar10; tests use the few-bit weights'
            " [default: float32]",
        ),
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SMALL,
            metavar="SPARSIFIER",
            help='train with few of the weights: "rigl(density=0.1)", "static_masks(density=0.1)";'
            ' methods only, which then go inside "masked(...)"; or keep few of the inputs too:'
            ' "swat(sparsity=0.9)" [default: all weights]',
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=LOST,
            metavar="SECONDS",
            help="strategies continue if a worker is killed, or silent for this long; methods need all"
            " workers [default: a lost worker ends the run]",
        ),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=LOST,
            help="with --patience: the fewest workers for a strategy to continue; fewer end the run with an"
            " error [default: 1]",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            rich_help_panel=LOST,
            help="with --patience: restart up to this many killed workers, from the others' model",
        ),
    ] = 0,
    stages: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=STAGES,
            help="cut the model into this many stages, one per worker; --with then codes their messages, such"
            ' as "ac_sgd(forward=4, backward=8)" [default: every worker has the whole model]',
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=STAGES, help="with --stages: number of pipelines, each with separate examples"
        ),
    ] = None,
    replicas_with: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=STAGES,
            metavar="SPEC",
            help="with --replicas: the method or strategy that keeps them together [default: dense()]",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=STAGES,
            help="with --stages: parts of a replica's batch [default: two a stage, if they divide it]",
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(rich_help_panel=STAGES, help="with --stages: 1f1b or gpipe [default: 1f1b]")
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SMALL,
            metavar="SPEC",
            help='compress saved activations, such as "comet()" [default: uncompressed]',
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(help="number of training examples, spread evenly over all [default: all]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="one of the task's models [default: its first]")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the data set [default: $LACONIC_DATA]")] = None,
    out: Annotated[Path, typer.Option(help="folder for all runs")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="name of the run's folder [default: task, time]")] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(help="steps between tests; 0: none but the last [default: a tenth of --steps]"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="report the time until tests reach this accuracy, such as 97"),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="steps between checkpoints; 0: none")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="resume the run of this --name")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="delete the run that --name has, if there is one")
    ] = False,
) -> None:
    """Train TASK with each method on several workers, and write runs/NAME/report.html.

    Baselines come first; all methods run with one seed before the next seed. Ctrl-C stops all workers at once
    and keeps all measurements. --resume continues each training from its last complete checkpoint.
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
        overwrite=overwrite,
        skew=skew,
        bits=bits,
        precision=precision,
        recipe=recipe,
        copies=copies,
        across=across,
        micro_batch_size=micro_batch_size,
        lowbit=lowbit,
        sparsity=sparsity,
        patience=patience,
        quorum=quorum,
        restarts=restarts,
        pipelining=PipelineOptions(stages, replicas, replicas_with, micro_batches, schedule),
        activations=activations,
        examples=examples,
        target=target,
    )
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
