"""`laconic methods`: every registered name that can follow --with, what it sends, and where it is from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.selector import Selector
from laconic.core.spec import find, names, parse
from laconic.reducers.reducer import Reducer
from laconic.strategies.method import Paper, lift

MATRIX = Layout.of([("weight", (1000, 1000))])
# for arguments without a default
EXAMPLES = {
    "density": 0.01,
    "value": 0.001,
    "levels": 7,
    "bits": 4,
    "block": 256,
}
PIECES = {"selector": Selector, "codec": Codec, "reducer": Reducer}


@dataclass(frozen=True)
class Entry:
    """One registered name. `bits`: payload bits a parameter of a large matrix, for the call in `spec`."""

    spec: str
    kind: str
    sends: str
    bits: float
    paper: str


def methods() -> None:
    """List all methods: what each sends, bits a parameter, and its paper."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("method", style="cyan", no_wrap=True)
    table.add_column("bits a parameter", justify="right", no_wrap=True)
    table.add_column("what it sends")
    table.add_column("paper")
    kind = ""
    for entry in entries():
        if kind and entry.kind != kind:
            table.add_section()
        kind = entry.kind
        table.add_row(entry.spec, f"{entry.bits:.3g}", entry.sends, entry.paper)
    console.print(table)
    console.print(
        "Codecs, selectors and reducers become methods, with error feedback where it is needed. "
        "Bits: payload of a matrix of a million parameters, at most.",
        style="dim",
    )


def entries() -> list[Entry]:
    """All names that stand for a method or can be lifted to one, methods first."""
    found = [entry for name in names() if (entry := _entry(name)) is not None]
    order = ["method", *PIECES]
    return sorted(found, key=lambda entry: (order.index(entry.kind), entry.spec))


def _entry(name: str) -> Entry | None:
    make = find(name)
    if isinstance(make, Paper):
        kind, sends, paper = "method", make.sends, make.paper
    else:
        bases = inspect.getmro(make) if inspect.isclass(make) else ()
        kinds = [kind for kind, base in PIECES.items() if base in bases]
        if not kinds:
            return None
        kind, sends, paper = kinds[0], _first_sentence(make), ""
    spec = _example(name, make)
    if spec is None:
        return None
    bits = 8 * lift(spec).nbytes(MATRIX) / MATRIX.numel
    return Entry(spec, kind, sends, bits, paper)


def _example(name: str, make: Callable[..., Any]) -> str | None:
    """A call of this name, with examples for arguments without a default; None where one has none."""
    needed = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is inspect.Parameter.empty
    ]
    if any(argument not in EXAMPLES for argument in needed):
        return None
    spec = f"{name}({', '.join(f'{argument}={EXAMPLES[argument]!r}' for argument in needed)})"
    try:
        parse(spec)
    except SpecError:
        return None
    return spec


def _first_sentence(make: Callable[..., Any]) -> str:
    text = " ".join((inspect.getdoc(make) or "").split("\n\n")[0].split())
    return text.split(". ")[0].split(": ")[0].rstrip(".")
