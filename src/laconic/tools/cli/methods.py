"""`laconic methods`: lists the names for --with, or shows one in full."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from laconic.core.errors import SpecError
from laconic.core.spec import find, parse, signature_text
from laconic.exchange.method import Paper
from laconic.tools.cli.console import console
from laconic.tools.cli.docstrings import flowing
from laconic.tools.cli.entries import FEW, MANY, TITLES, CatalogueEntry, entries, headline, pieces
from laconic.tools.cli.shortlist import print_short

HEADS = (f"N = {FEW}", f"N = {MANY}", "smaller", "any N", "error", "bound", "unbiased")
WIDE = 110  # columns, below which figures are listed vertically
LISTED = 5
STATUS = {
    "verified": "checked against its authors' or other public code",
    "partial": "checked against public code, but a part of the paper is missing or changed",
    "recalled": "standard knowledge, not checked against code",
    "reconstruction": "built without the authors' code, from the abstract: we filled the gaps",
    "own": "no paper: plain arithmetic, or a design of ours",
}
LEGEND = (
    "Measured on a stored gradient of a small trained net, matrices only. N = 4, N = 16: bits per parameter"
    " that a worker puts on the wire in a step, among 4 or 16 workers; any N: the same by formula (a gather"
    " grows with N - 1, all-reduce hardly: (N-1)/N); smaller: ratio to a dense all-reduce among 4 and among"
    " 16; below 1 it sends more. error: mean |C(x) - x|^2 / |x|^2. Selectors, codecs and"
    " reducers become methods, with error feedback if they need it. A strategy's bits depend on its graph."
    " `laconic methods NAME` shows all about one name.\n"
    "Status of an implementation: " + "; ".join(f"{word}: {says}" for word, says in STATUS.items()) + "."
)


def methods(
    name: Annotated[str | None, typer.Argument(help="show all about this name")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="list selectors, codecs and pieces too, with papers and all figures")
    ] = False,
    find_: Annotated[
        str | None,
        typer.Option("--find", metavar="WORD", help="list only entries with this word: momentum"),
    ] = None,
) -> None:
    """List the methods with their payload and bits; or show one in full."""
    screen = console()
    if name is not None:
        if "(" in name and not name.endswith("()"):
            parse(name)
        return show(screen, name.partition("(")[0].strip())
    found = entries() if find_ is None else matching(find_)
    if not found:
        raise SpecError(
            f"no method has {find_!r} in its name, description or paper: `laconic methods` lists all"
        )
    if every:
        screen.print(listing(found, with_pieces=find_ is None))
        screen.print(LEGEND, style="dim")
    else:
        print_short(screen, found, with_presets=find_ is None)
    return None


def matching(word: str) -> list[CatalogueEntry]:
    return [
        each
        for each in entries()
        if word.lower() in f"{each.name} {each.sends} {each.paper} {each.kind}".lower()
    ]


def listing(found: Sequence[CatalogueEntry], *, with_pieces: bool = True) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("name, payload, paper", ratio=1)
    for head in HEADS[:LISTED]:
        table.add_column(head, justify="right", no_wrap=head != "any N")
    for kind, listed in groupby(found, key=lambda entry: entry.kind):
        table.add_row(_heading(TITLES[kind]))
        for _, specs in groupby(listed, key=lambda entry: entry.name):
            for nth, entry in enumerate(specs):
                cited = f"{entry.sends} ({source(entry)})"
                table.add_row(_words(entry.spec, "" if nth else cited), *cells(entry)[:LISTED])
    for title, named in pieces().items() if with_pieces else ():
        table.add_row(_heading(title))
        for name, make in named.items():
            table.add_row(_words(f"{name}()", f"{headline(make)} ({source(make)})"))
    return table


def source(named: CatalogueEntry | Callable[..., Any]) -> str:
    """Return a name's paper and status.

    >>> source(find("ring")), source(find("torus"))
    ('Lian et al. 2017, arXiv:1705.09056, verified', 'own')
    """
    paper, status = getattr(named, "paper", "-"), getattr(named, "status", "own")
    return status if paper == "-" else f"{paper}, {status}"


def _heading(title: str) -> RenderableType:
    return Padding(Text(title, "bold"), (1, 0, 0, 0))


def _words(call: str, description: str) -> RenderableType:
    below = (Padding(Text(description, "dim"), (0, 0, 0, 2)),) if description else ()
    return Padding(Group(Text(call, "cyan"), *below), (0, 1, 0, 0))


def cells(entry: CatalogueEntry) -> tuple[str, ...]:
    figures = entry.measured
    unbiased = {None: "-", True: "yes", False: "no"}[entry.unbiased]
    if entry.max_bits is None:
        return ("-",) * len(HEADS)
    if figures is None:
        return "-", "-", "-", f"message <= {entry.max_bits:.3g}", "-", "-", unbiased
    sent = (f"{figures.sent_at(size):.3g}" for size in (FEW, MANY))
    smaller = " and ".join(times(figures.smaller(size)) for size in (FEW, MANY))
    size = (*sent, smaller, str(figures.growth))
    if figures.error is None or figures.bound is None:
        return *size, "-", "-", unbiased
    return *size, f"{figures.error:.3g}", f"{figures.bound:.3g}", unbiased


def times(ratio: float) -> str:
    """Format a ratio.

    >>> times(3.5566), times(41234.5)
    ('3.56', '41,234')
    """
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"


def show(screen: Console, name: str) -> None:
    make = find(name)
    found = [entry for entry in entries() if entry.name == name]
    screen.print(Text(f"{name}{signature_text(make)}", "bold cyan"))
    for text in (sys.modules[make.__module__].__doc__, inspect.getdoc(make)):
        screen.print()
        screen.print(flowing(text or "", screen.width), markup=False)
    facts = Table(box=None, padding=(0, 1), show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(ratio=1, overflow="fold")
    status = getattr(make, "status", "own")
    facts.add_row("paper", getattr(make, "paper", "-"))
    code = getattr(make, "code", "-")
    against = f" ({code})" if code != "-" else ""
    facts.add_row("status", f"{status}: {STATUS[status]}{against}")
    if isinstance(make, Paper):
        facts.add_row("sends", make.sends)
    for needs in dict.fromkeys(entry.needs for entry in found if entry.needs):
        facts.add_row("needs", needs)
    facts.add_row("examples", Text("\n".join(getattr(make, "examples", ()) or (f"{name}()",)), "cyan"))
    screen.print()
    screen.print(facts)
    if any(entry.max_bits is not None for entry in found):
        for figures in [across(found)] if screen.width >= WIDE else map(upright, found):
            screen.print()
            screen.print(figures)


def across(found: Sequence[CatalogueEntry]) -> Table:
    figures = Table(box=None, padding=(0, 1), header_style="bold")
    figures.add_column("measured", style="cyan", overflow="fold")
    for head in HEADS:
        figures.add_column(head, justify="right", no_wrap=True)
    for entry in found:
        figures.add_row(entry.spec, *cells(entry))
    return figures


def upright(entry: CatalogueEntry) -> Table:
    figures = Table(box=None, padding=(0, 1), show_header=False)
    figures.title, figures.title_style, figures.title_justify = entry.spec, "cyan", "left"
    for head, cell in zip(HEADS, cells(entry), strict=True):
        figures.add_row(head, cell)
    return figures
