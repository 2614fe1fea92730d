"""Every registered name on one real gradient: what it sends, what it loses, what it declares.

    python -m benchmarks.methods                  all names; writes src/laconic/cli/measured.json
    python -m benchmarks.methods --only topk      only specs that start with this; writes nothing

The catalogue decides what is measured: registering a method, codec, selector or reducer puts it in the
table. `laconic methods` and docs/methods.md show the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import laconic.cli
from benchmarks.distortion import KEYS, distortion
from benchmarks.gradient import FILE, stored
from benchmarks.payload import LATE, RANKS, STEPS, payload
from laconic.cli.entries import FIGURES, Measured, examples
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from laconic.methods import catalogue
from laconic.strategies.strategy import Strategy

TARGET = Path(laconic.cli.__file__).parent / FIGURES
DIGITS = 6  # significant, of every figure


def measure(spec: str, gradient: Mapping[str, Tensor]) -> Measured:
    """All figures of one spec."""
    method = lift(spec)
    matrices = {name: part for name, part in gradient.items() if part.dim() > 1}
    layout = Layout.of((name, tuple(part.shape)) for name, part in matrices.items())
    flat = torch.cat([part.flatten() for part in matrices.values()])
    lost = distortion(method, flat, layout, LATE)
    return Measured(
        bits=bits(spec, gradient),
        matrix_bits=bits(spec, matrices),
        error=short(lost.error) if lost else None,
        bias=short(lost.bias) if lost else None,
        bound=short(lost.bound) if lost else None,
        absolute=bool(lost and lost.absolute),
    )


def bits(spec: str, gradient: Mapping[str, Tensor]) -> float:
    """Payload of a worker and step, in bits a parameter."""
    parameters = sum(part.numel() for part in gradient.values())
    return short(8 * payload(lift(spec), gradient) / parameters)


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
    every = (spec for name, make in made.items() for spec in examples(name, make))
    return sorted(spec for spec in every if not lift(spec).adaptive)


def write(rows: Mapping[str, Measured], gradient: Mapping[str, Tensor]) -> None:
    """The file, one spec a line."""
    about = {
        "gradient": FILE.name,
        "parameters": sum(part.numel() for part in gradient.values()),
        "ranks": RANKS,
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
    only = parser.parse_args().only
    torch.set_num_threads(1)
    gradient = stored()
    rows = {spec: measure(spec, gradient) for spec in specs() if spec.startswith(only)}
    table = Table(title=f"{FILE.name}, {RANKS} ranks, {STEPS} steps")
    for column in ("spec", "bits", "matrices", "error", "of it bias", "bound"):
        table.add_column(column)
    for spec, row in rows.items():
        lost = ("-", "-", "-") if row.error is None else (row.error, row.bias, row.bound)
        kind = " absolute" if row.absolute else ""
        table.add_row(
            spec, f"{row.bits:.4g}", f"{row.matrix_bits:.4g}", *map(str, lost[:2]), f"{lost[2]}{kind}"
        )
    Console(width=130).print(table)
    if not only:
        write(rows, gradient)


if __name__ == "__main__":
    main()
