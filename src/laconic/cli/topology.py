"""`laconic topology`: who talks to whom in gossip, how fast that averages, and a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from laconic.cli.console import console
from laconic.cli.files import write_svg
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.report.topology_picture import picture
from laconic.strategies.gossip.averaging import averaging
from laconic.strategies.gossip.mixing import is_regular
from laconic.strategies.gossip.topology import Topology

MOST = 256  # ranks that a circle can show
LEFT = 0.01  # share of the disagreement, of which steps are told until it is left


def topology(
    spec: Annotated[
        str, typer.Argument(help="such as exponential(), ring() or torus(rows=2)", show_default=False)
    ],
    size: Annotated[int, typer.Option(help=f"ranks, at most {MOST}")] = 16,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write a picture here, as SVG")] = None,
    step: Annotated[int | None, typer.Option(help="draw this step only, not all of a period")] = None,
) -> None:
    """Show a gossip topology: its period, messages and speed of averaging; and draw it."""
    made = parse(spec)
    if not isinstance(made, Topology):
        raise SpecError(
            f"{arguments.shown(spec)} is no topology: take one such as exponential(), ring() or torus()"
        )
    if size > MOST:
        raise SpecError(f"--size must be at most {MOST}, got {size}: a circle shows no more")
    if step is not None:
        arguments.whole("--step", step)
    made.check(size)
    if out is not None:
        write_svg(out, picture(made, size, step))
    screen = console()
    screen.print(Text(f"{made!r} among {size} ranks", "bold cyan"))
    screen.print(facts(made, size))
    if out is not None:
        screen.print(Text(f"picture: {out}", "dim"))


def facts(made: Topology, size: int) -> Table:
    """What is to be known of it, a line each."""
    period = made.period(size)
    degrees = {len(made.peers(rank, size, at).out) for at in made.span(size) for rank in range(size)}
    sends = " to ".join(str(degree) for degree in sorted({min(degrees), max(degrees)}))
    regular = (
        "yes: PushSum weights stay 1" if is_regular(made, size) else "no: uniform shares need PushSum weights"
    )
    symmetric = "yes: also for D-PSGD and CHOCO" if made.symmetric else "no: for SGP, which pushes one way"
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("period", f"{period} step{'s' * (period > 1)}" if period else "never repeats")
    table.add_row("sends", f"{sends} message{'s' * (max(degrees) > 1)} a rank and step")
    table.add_row("regular", regular)
    table.add_row("symmetric", symmetric)
    table.add_row("averages", speed(made, size))
    return table


def speed(made: Topology, size: int) -> str:
    """How fast ranks come to agree by uniform mixing."""
    found = averaging(made, size)
    if found.exact:
        return f"exactly, in {found.exact} step{'s' * (found.exact > 1)}"
    return (
        f"a step keeps {found.kept:.3g} of the disagreement in the long run:"
        f" about {found.steps_to(LEFT):,} steps to {LEFT:.0%}"
    )
