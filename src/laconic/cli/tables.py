"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from laconic.report.html import ratio
from laconic.report.summary import Row

HEADS = ("accuracy %", "test loss", "MB a step", "smaller", "wire MB", "step ms")
SPARSE = 0.001  # share of zero weights from which they are worth a column


def print_summary(console: Console, rows: list[Row]) -> None:
    """One row a method; bytes and times a step are those of the second half of the steps."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("method", style="cyan", no_wrap=True)
    sparse = any(row.zeros > SPARSE for row in rows)
    for name in (*HEADS, "zeros %") if sparse else HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        zeros = (f"{100 * row.zeros:.1f}",) if sparse else ()
        table.add_row(
            row.spec,
            row.accuracy.text(100),
            row.test_loss.text(digits=3),
            f"{row.payload_mb:.4g}",
            ratio(row.smaller),
            f"{row.wire_mb:.4g}",
            row.step_s.text(1000, 1),
            *zeros,
        )
    console.print()
    console.print(table)
    if rows:
        console.print(
            "Bytes and times are a worker's, a step, in the second half of the steps; "
            "means over seeds ± standard error; smaller: than dense float32.",
            style="dim",
        )
