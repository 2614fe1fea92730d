"""`laconic partition`: the examples of each client of a task."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.data.partition import Deal, Partition
from laconic.tools.cli.console import console
from laconic.tools.cli.files import check_svg, write_svg
from laconic.tools.report.partition_picture import picture
from laconic.tools.tasks import find
from laconic.tools.tasks.task import labels

CLIENTS = 100  # default if the data have no number of clients


def partition(
    task: Annotated[str, typer.Argument(help="digits, mnist, cifar10 or shakespeare", show_default=False)],
    by: Annotated[
        str, typer.Option(help="such as iid(), dirichlet(0.1), label_shards() or classes_per_client(2)")
    ] = "iid()",
    clients: Annotated[
        int | None, typer.Option(help=f"number of clients [default: {CLIENTS}, or all speakers]")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the partition")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="draw it to this SVG file")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the data set [default: $LACONIC_DATA]")] = None,
) -> None:
    """Show how a task's training examples are split among clients, as in federated learning; and draw it."""
    check_svg(out)
    made = parse(by)
    if not isinstance(made, Partition):
        raise SpecError(
            f"{arguments.shown(by)} is not a partition: give one such as iid(), dirichlet(0.1),"
            " label_shards() or classes_per_client(2)"
        )
    found = find(task)
    tensors = found.load(data)
    number = CLIENTS if clients is None and made.deals_by == "labels" else clients
    deal = made.over(found.kinds_for(made, tensors), number, seed)
    kinds = found.kinds(tensors["train_y"])
    rows = "label" if found.kinds is labels else "part"
    if out is not None:
        write_svg(out, picture(deal, found.title, kinds, rows))
    screen = console()
    screen.print(Text(f"{made!r} on {found.name}", "bold cyan"))
    screen.print(facts(deal, deal.counts(kinds).count_nonzero(1).tolist(), rows))
    if out is not None:
        screen.print(Text(f"picture: {out}", "dim"))


def facts(deal: Deal, held: list[int], rows: str) -> Table:
    left = len(deal.kinds) - sum(deal.sizes)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("clients", f"{deal.clients:,}")
    table.add_row("examples", spread(deal.sizes))
    table.add_row(f"{rows}s", spread(held))
    table.add_row(
        "dealt", f"all {len(deal.kinds):,}" if not left else f"all but {left:,} of {len(deal.kinds):,}"
    )
    return table


def spread(values: list[int]) -> str:
    """Describe the range and median of the clients.

    >>> spread([3, 1, 2, 10]), spread([600, 600])
    ('1 to 10 per client, median 2.5', '600 per client')
    """
    if min(values) == max(values):
        return f"{values[0]:,} per client"
    return f"{min(values):,} to {max(values):,} per client, median {median(values):,g}"
