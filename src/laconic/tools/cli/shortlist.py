"""Short list of `laconic methods`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.tools.cli.entries import FEW, MANY, TITLES, CatalogueEntry
from laconic.tools.cli.presets import PRESETS

LEAST_PAYLOAD_WIDTH = 20
BESIDE = 2 + 4 * 2 + 2 * 6  # width beside name and payload: indent, padding, two figures of 6
NAMED_ONLY = ("selector", "codec", "reducer")


def print_short(screen: Console, found: Sequence[CatalogueEntry], *, with_presets: bool) -> None:
    if with_presets:
        screen.print("Begin with", style="bold")
        first = Table(box=None, padding=(0, 1), show_header=False)
        first.add_column(style="cyan", no_wrap=True)
        first.add_column(ratio=1)
        for preset in PRESETS:
            first.add_row(preset.spec, f"when {preset.when.replace('`', '')}")
        screen.print(first)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("name", style="cyan", no_wrap=True)
    for size in (FEW, MANY):
        table.add_column(f"N = {size}", justify="right", no_wrap=True)
    room = screen.width - max(len(entry.name) for entry in found) - BESIDE
    shows_payload = room >= LEAST_PAYLOAD_WIDTH
    if shows_payload:
        table.add_column("payload", max_width=room, no_wrap=True, overflow="ellipsis")
    named: list[tuple[str, str]] = []
    for kind, group in groupby(found, key=lambda entry: entry.kind):
        each = {entry.name: entry for entry in reversed(list(group))}
        if kind in NAMED_ONLY and with_presets:
            named.append((TITLES[kind].partition(":")[0], ", ".join(reversed(each))))
            continue
        table.add_row(Text(TITLES[kind].partition(":")[0], "bold"))
        for name in reversed(each):
            sent = (bits(each[name], size) for size in (FEW, MANY))
            table.add_row(f"  {name}", *sent, *([each[name].sends] if shows_payload else []))
    screen.print()
    screen.print(table)
    for title, names in named:
        screen.print(Text.assemble((f"{title} ", "bold"), (names, "cyan")))
    screen.print(
        f"N = {FEW}, N = {MANY}: bits per parameter that a worker sends in a step among N; dense sends"
        " 48 and 60, and gathered messages grow with N - 1. laconic methods NAME: all about one; --find WORD:"
        " those with a word; --all: everything, with papers and figures",
        style="dim",
        markup=False,
    )


def bits(entry: CatalogueEntry, size: int) -> str:
    return "-" if entry.measured is None else f"{entry.measured.sent_at(size):.3g}"
