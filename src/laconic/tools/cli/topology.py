"""`laconic topology`: neighbours in gossip, how fast they average, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.core.units import format_count
from laconic.strategies.gossip.mixing import is_regular
from laconic.strategies.gossip.mixing.averaging import averaging
from laconic.strategies.gossip.topologies import Topology
from laconic.tools.cli.console import console
from laconic.tools.cli.files import check_svg, write_svg
from laconic.tools.report.topology_picture import picture

MAX_RANKS = 256
LEFT = 0.01  # remaining disagreement for which the table shows the steps


def topology(
    spec: Annotated[
        str, typer.Argument(help="such as exponential(), ring() or torus(rows=2)", show_default=False)
    ],
    size: Annotated[int, typer.Option(help=f"number of ranks, at most {MAX_RANKS}")] = 16,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="draw it to this SVG file")] = None,
    step: Annotated[int | None, typer.Option(help="draw only this step, not the whole period")] = None,
) -> None:
    """Show a gossip topology: its period, its messages and how fast it averages; and draw it."""
    check_svg(out)
    made = parse(spec)
    if not isinstance(made, Topology):
        raise SpecError(
            f"{arguments.shown(spec)} is not a topology: give one such as exponential(), ring() or torus()"
        )
    if size > MAX_RANKS:
        raise SpecError(f"--size must be at most {MAX_RANKS}, got {size}: a circle cannot show more")
    if step is not None:
        arguments.whole("--step", step)
    made.check(size)
    if out is not None:
        write_svg(out, picture(made, size, step))
    screen = console()
    screen.print(Text(f"{made!r} among {format_count(size, 'rank')}", "bold cyan"))
    screen.print(facts(made, size))
    if out is not None:
        screen.print(Text(f"picture: {out}", "dim"))


def facts(made: Topology, size: int) -> Table:
    period = made.period(size)
    degrees = {len(made.peers(rank, size, at).out) for at in made.span(size) for rank in range(size)}
    sends = " to ".join(str(degree) for degree in sorted({min(degrees), max(degrees)}))
    regular = (
        "yes: PushSum weights stay 1" if is_regular(made, size) else "no: uniform shares need PushSum weights"
    )
    symmetric = (
        "yes: works with D-PSGD and CHOCO too" if made.symmetric else "no: only for SGP, which pushes one way"
    )
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("period", f"{period} step{'s' * (period > 1)}" if period else "never repeats")
    table.add_row("sends", f"{sends} message{'s' * (max(degrees) > 1)} per rank and step")
    table.add_row("regular", regular)
    table.add_row("symmetric", symmetric)
    table.add_row("averages", speed(made, size))
    return table


def speed(made: Topology, size: int) -> str:
    found = averaging(made, size)
    if found.exact:
        return f"exactly, in {found.exact} step{'s' * (found.exact > 1)}"
    return (
        f"each step keeps {found.kept:.3g} of the disagreement in the long run:"
        f" about {found.steps_to(LEFT):,} steps to {LEFT:.0%}"
    )
