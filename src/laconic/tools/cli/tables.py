"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from laconic.tools.report.html import ratio
from laconic.tools.report.reaching import faster
from laconic.tools.report.summary import Row, between, counted, kept_bytes

HEADS = ("accuracy %", "test loss", "MB / step", "smaller", "payload", "step ms")
SPARSE = 0.001


def print_summary(console: Console, rows: list[Row], target: float | None = None) -> None:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(
        "method, optimiser and learning rate", overflow="fold", min_width=min(17, console.width // 6)
    )
    sparse = any(row.zeros > SPARSE for row in rows)
    timed = () if target is None else (f"s to {target:g} %",)
    for name in (*timed, *HEADS, "zeros %") if sparse else (*timed, *HEADS):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        zeros = (f"{100 * row.zeros:.1f}",) if sparse else ()
        table.add_row(
            Group(Text(row.spec, "cyan"), Text(row.optimiser, "dim")),
            *(row.reach_s.text(digits=1) for _ in timed),
            row.accuracy.text(100),
            row.test_loss.text(digits=3),
            f"{row.wire_mb:.4g}",
            ratio(row.smaller),
            f"{row.payload_mb:.4g}",
            row.step_s.text(1000, 1),
            *zeros,
        )
    console.print()
    console.print(table)
    if rows:
        console.print(
            "Bytes and times are per worker and step, in the second half of the steps; means over seeds ± "
            "standard error. MB: on the wire, every copy with its headers; smaller: how many times smaller "
            "than a dense all-reduce among as many workers; payload: MB with each message counted once.",
            style="dim",
        )
    for sentence in (faster(rows, target), counted(rows), between(rows), kept_bytes(rows)):
        if sentence:
            console.print(sentence, style="dim", markup=False)


def shown(value: float) -> str:
    """Format a figure without an exponent.

    >>> shown(0.4551), shown(12.345), shown(28662.1)
    ('0.455', '12.3', '28,662')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
