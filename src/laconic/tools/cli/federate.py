"""`laconic federate`: a built-in task among clients, and a report."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from laconic.core import arguments
from laconic.core.atomic_file import appending, naming, write_text
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.federated.schemes import scheme_of
from laconic.tools.cli.console import console, errors
from laconic.tools.cli.files import check_free, check_name, default_name, fresh_folder
from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.startup import INTERRUPTED
from laconic.tools.cli.versions import version_of
from laconic.tools.report import check_packages
from laconic.tools.report.federation.page import HEADS, publish_federation
from laconic.tools.report.federation.series import Row
from laconic.tools.report.html import ratio
from laconic.tools.report.ledger import CONFIG, EVENTS, read_events
from laconic.tools.tasks import federation, find
from laconic.tools.tasks.federation import Federation, deal, partition_of
from laconic.tools.tasks.on_flower import check_engine, federate_on_flower

WAY_OUT = "give another --name, or --overwrite to delete it"
MOMENTUM = 0.0  # with few clients per round, a momentum belongs to an old model
BATCH = 20
PER_ROUND = 10
ENGINES = ("here", "flower")
FLOWER_LOG = "flower.log"


def federate(
    task: Annotated[str, typer.Argument(help="digits, mnist, cifar10 or shakespeare", show_default=False)],
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help='a scheme, "stc(density=0.01, down=0.01)"; may be repeated'),
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help='a baseline, "fedavg()"; ratios compare with the first')
    ] = None,
    clients: Annotated[int, typer.Option(help="number of clients")] = 100,
    per_round: Annotated[
        int | None,
        typer.Option(
            help="clients per round, for schemes without sampling= [default: 10, or all of fewer clients]"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="how many")] = 200,
    local_steps: Annotated[int, typer.Option(help="steps of each client in each round")] = 5,
    by: Annotated[
        str, typer.Option(help="partition of the examples; `laconic partition` shows it")
    ] = "iid()",
    classes_per_client: Annotated[
        int | None, typer.Option(help="short for --by 'classes_per_client(N)'")
    ] = None,
    seeds: Annotated[int, typer.Option(help="trainings per scheme, with seeds from --seed upwards")] = 1,
    seed: Annotated[int, typer.Option(help="the first seed")] = 0,
    batch: Annotated[int, typer.Option(help="examples of a local step")] = BATCH,
    lr: Annotated[float | None, typer.Option(help="learning rate [default: the task's]")] = None,
    momentum: Annotated[float, typer.Option(help="of a client, within a round")] = MOMENTUM,
    model: Annotated[str | None, typer.Option(help="one of the task's models [default: its first]")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the data set [default: $LACONIC_DATA]")] = None,
    out: Annotated[Path, typer.Option(help="folder for all runs")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="name of the run's folder [default: task, time]")] = None,
    engine: Annotated[
        str,
        typer.Option(help="here: all clients in this process; flower: Flower's simulation engine, in Ray's"),
    ] = ENGINES[0],
    eval_every: Annotated[
        int | None, typer.Option(help="rounds between tests [default: a twentieth of --rounds]")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="delete the run that --name has, if there is one")
    ] = False,
) -> None:
    """Train TASK among clients with each scheme, and write runs/NAME/report.html: accuracy against bytes.

    All clients are in this process; messages are those of a real run, and their bytes are counted. With
    --engine flower they are nodes of Flower's simulation engine, each in a process of Ray: the same updates,
    at seconds a round, and the first model is sent too. Baselines come first; all schemes run with one seed
    before the next seed. Ctrl-C keeps all measurements.
    """
    arguments.choice("--engine", engine, ENGINES)
    if classes_per_client is not None:
        if by != "iid()":
            raise SpecError(f"--classes-per-client sets the partition: remove --by {by!r}")
        by = f"classes_per_client({classes_per_client})"
    baselines = [_normal(text) for text in against or ()]
    texts = dict.fromkeys([*baselines, *(_normal(text) for text in with_ or ())])
    if not texts:
        raise SpecError('no scheme given: choose one, such as --with "stc(density=0.01, down=0.01)"')
    if seeds < 1:
        raise SpecError(f"--seeds must be 1 or more, got {seeds}")
    found = find(task)
    recipe = found.recipe(model)
    plan = Federation(
        task=found.name,
        model=model,
        spec="",
        by=repr(partition_of(by)),
        clients=clients,
        per_round=min(PER_ROUND, clients) if per_round is None else per_round,
        rounds=rounds,
        local_steps=local_steps,
        batch=batch,
        lr=recipe.lr if lr is None else lr,
        momentum=momentum,
        seed=seed,
        eval_every=max(1, rounds // 20) if eval_every is None else eval_every,
    )
    check_packages()
    if engine == "flower":
        check_engine()
    name = default_name(task) if name is None else name
    check_name(name, out)
    folder = out / name
    check_free(folder, overwrite=overwrite, way_out=WAY_OUT)
    tensors = found.load(data)
    deal(plan, tensors)  # raises if the partition does not fit
    for text in texts:
        net = recipe.build()
        scheme_of(text).attached(net).server(net.state_dict())
    fresh_folder(folder, overwrite=overwrite, way_out=WAY_OUT)
    config = _config(plan, folder.name, list(texts), baselines, seeds, found.title)
    write_text(folder / CONFIG, json.dumps(config, indent=1))
    screen, interrupts, reason = console(), Interrupts(), None
    for text in texts:
        _show_sampling(screen, text, plan)
    try:
        with interrupts, appending(folder / EVENTS) as events:
            for number in range(seed, seed + seeds):
                for text in texts:
                    settings = replace(plan, spec=text, seed=number)
                    if engine == "flower":
                        results = federate_on_flower(settings, data, folder / FLOWER_LOG)
                    else:
                        results = federation.federate(settings, tensors)
                    for event in results:
                        with interrupts.held(), naming(folder / EVENTS):
                            events.write(json.dumps({"scheme": text, "seed": number, **event}) + "\n")
                            events.flush()
                        _show(screen, text, number, plan, event)
    except KeyboardInterrupt:
        reason = "Interrupted: this report covers the measurements until then."
        errors().print(f"laconic: {reason}", style="yellow", markup=False)
    if read_events(folder):
        rows, report = publish_federation(folder, reason)
        _print_table(screen, rows)
        screen.print(f"\nreport: {report}", markup=False)
    if reason:
        raise typer.Exit(INTERRUPTED)


def _normal(text: str) -> str:
    return repr(parse(text))


def _config(
    plan: Federation, name: str, schemes: list[str], against: list[str], seeds: int, title: str
) -> dict[str, Any]:
    return {
        **{key: value for key, value in vars(plan).items() if key not in ("spec", "seed")},
        "model": plan.model or next(iter(find(plan.task).models)),
        "name": name,
        "title": title,
        "schemes": schemes,
        "against": against,
        "seeds": seeds,
        "first_seed": plan.seed,
        "versions": f"laconic {version_of('laconic')}, torch {torch.__version__},"
        f" Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {platform.system()}",
        "started": time.strftime("%Y-%m-%d %H:%M"),
    }


def _show_sampling(screen: Console, text: str, plan: Federation) -> None:
    if (sampling := scheme_of(text).sampling) is not None:
        first, last = (sampling.count(number, plan.clients) for number in (1, plan.rounds))
        screen.print(
            f"{text}: {sampling} sets the clients per round, {first} of {plan.clients} in the first round and"
            f" {last} in the last, not --per-round {plan.per_round}",
            markup=False,
        )


def _show(screen: Console, text: str, seed: int, plan: Federation, event: dict[str, Any]) -> None:
    for client, why in event["failed"].items():
        screen.print(f"{text}  round {event['round']}: client {client} left out: {why}", markup=False)
    if "accuracy" in event:
        screen.print(
            f"{text}  seed {seed}  round {event['round']}/{plan.rounds}  accuracy"
            f" {100 * event['accuracy']:.2f} %  {event['up'] / 1000:,.1f} kB up,"
            f" {event['down'] / 1000:,.1f} kB down in this round",
            markup=False,
        )


def _print_table(screen: Console, rows: list[Row]) -> None:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("scheme", style="cyan", overflow="fold", min_width=17)
    for head, _ in HEADS[1:6]:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row.spec,
            row.accuracy.text(100),
            row.test_loss.text(digits=3),
            f"{row.up_mb:,.4g}",
            f"{row.down_mb:,.4g}",
            ratio(row.smaller),
        )
    screen.print()
    screen.print(table)
    screen.print("MB: all clients together in the whole run, every message with its header.", style="dim")
