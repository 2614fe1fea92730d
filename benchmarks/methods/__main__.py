"""Every registered name on one real gradient: what it sends, what it loses, what it declares.

    python -m benchmarks.methods                  all names; writes src/laconic/tools/cli/measured.json
    python -m benchmarks.methods --new            only specs that are not in it yet; keeps the others' figures
    python -m benchmarks.methods --only topk      only specs that start with this; writes nothing

The catalogue decides what is measured, and the picks of docs/choosing.md: registering a method, codec,
selector or reducer puts it in the table. `laconic methods` and docs/methods.md show the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import laconic.tools.cli
from benchmarks.gradient import FILE, stored
from benchmarks.methods.distortion import KEYS, distortion
from benchmarks.methods.payload import LATE, STEPS, traffic
from benchmarks.pages.situations import SITUATIONS
from laconic.core.layout import Layout
from laconic.exchange.method import Method, lift
from laconic.methods import catalogue
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.cli.entries import FEW, FIGURES, GROUPS, Measured, examples

TARGET = Path(laconic.tools.cli.__file__).parent / FIGURES
ELSEWHERE = ("by_name(", "two_level(")  # picks that need a model with embeddings, or machines
DIGITS = 6  # significant, of every figure


def measure(spec: str, gradient: Mapping[str, Tensor]) -> Measured:
    """All figures of one spec."""
    method = lift(spec)
    matrices = {name: part for name, part in gradient.items() if part.dim() > 1}
    layout = Layout.of((name, tuple(part.shape)) for name, part in matrices.items())
    flat = torch.cat([part.flatten() for part in matrices.values()])
    message, sent = bits(spec, matrices)
    lost = distortion(method, flat, layout, LATE)
    return Measured(
        bits=message,
        sent=tuple(sent),
        error=short(lost.error) if lost else None,
        bias=short(lost.bias) if lost else None,
        bound=short(lost.bound) if lost else None,
        absolute=bool(lost and lost.absolute),
    )


def bits(
    spec: str, gradient: Mapping[str, Tensor], groups: Sequence[int] = GROUPS
) -> tuple[float, list[float]]:
    """Bits a parameter and step: a worker's payload among FEW, and what one sends in each of these groups."""
    parameters = sum(part.numel() for part in gradient.values())
    found = {size: traffic(lift(spec), gradient, size) for size in groups}
    sent = [short(8 * each.sent / parameters) for each in found.values()]
    return short(8 * found[FEW].payload / parameters), sent


def short(value: float) -> float:
    """A figure as it is kept."""
    return float(f"{value:.{DIGITS}g}")


def specs() -> list[str]:
    """What is measured: all but strategies, which do not exchange gradients, and what a link decides."""
    made = {
        name: make
        for name, make in catalogue().items()
        if not (isinstance(make, type) and issubclass(make, Strategy))
    }
    every = {spec for name, make in made.items() for spec in examples(name, make)}
    picks = (pick.spec for situation in SITUATIONS for pick in situation.picks)
    every |= {
        spec
        for spec in picks
        if isinstance(strategy_or_method(spec), Method) and not spec.startswith(ELSEWHERE)
    }
    return sorted(spec for spec in every if not lift(spec).adaptive)


def write(rows: Mapping[str, Measured], gradient: Mapping[str, Tensor]) -> None:
    """The file, one spec a line."""
    about = {
        "gradient": FILE.name,
        "parameters": sum(part.numel() for part in gradient.values()),
        "groups": GROUPS,
        "steps": STEPS,
        "keys": KEYS,
    }
    lines = [
        f"  {json.dumps(spec)}: {json.dumps(asdict(row), allow_nan=False)}" for spec, row in rows.items()
    ]
    head = json.dumps(about)[:-1]
    TARGET.write_text(f'{head}, "figures": {{\n' + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="how the specs begin")
    parser.add_argument("--new", action="store_true", help="only specs without figures")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gradient = stored()
    kept = {spec: Measured(**row) for spec, row in json.loads(TARGET.read_text())["figures"].items()}
    kept = kept if asked.new else {}
    due = [spec for spec in specs() if spec.startswith(asked.only) and spec not in kept]
    rows = {spec: measure(spec, gradient) for spec in due}
    table = Table(title=f"{FILE.name}, {STEPS} steps")
    for column in ("spec", "message", *(f"sent, {size}" for size in GROUPS), "error", "of it bias", "bound"):
        table.add_column(column)
    for spec, row in rows.items():
        lost = ("-", "-", "-") if row.error is None else (row.error, row.bias, row.bound)
        kind = " absolute" if row.absolute else ""
        sent = (f"{each:.4g}" for each in row.sent)
        table.add_row(spec, f"{row.bits:.4g}", *sent, *map(str, lost[:2]), f"{lost[2]}{kind}")
    Console(width=130).print(table)
    if not asked.only:
        every = kept | rows
        write({spec: every[spec] for spec in specs()}, gradient)


if __name__ == "__main__":
    main()
