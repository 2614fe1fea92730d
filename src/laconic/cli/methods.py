"""`laconic methods`: every name that can follow --with, what it sends, and where it is from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from laconic.cli.console import console
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.selector import Selector
from laconic.methods import catalogue
from laconic.reducers.reducer import Reducer
from laconic.strategies.method import Paper, lift

MATRIX = Layout.of([("weight", (1000, 1000))])
KINDS = {"paper": Paper, "selector": Selector, "codec": Codec, "reducer": Reducer}


@dataclass(frozen=True)
class Entry:
    """One registered name. `bits`: payload bits a parameter of MATRIX, at most, for the call in `spec`."""

    spec: str
    kind: str
    sends: str
    bits: float
    paper: str


def methods() -> None:
    """List all methods: what each sends, bits a parameter, and its paper."""
    screen = console()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("method", style="cyan", overflow="fold")
    table.add_column("bits", justify="right", no_wrap=True)
    table.add_column("what it sends", ratio=1)
    table.add_column("paper", max_width=26)
    listed = entries()
    for entry, following in zip(listed, [*listed[1:], None], strict=True):
        last = following is None or following.kind != entry.kind
        table.add_row(entry.spec, f"{entry.bits:.3g}", entry.sends, entry.paper, end_section=last)
    screen.print(table)
    screen.print(
        "bits: payload a parameter, for a matrix of a million parameters, at most. "
        "Selectors, codecs and reducers become methods, with error feedback where it is needed.",
        style="dim",
    )


def entries() -> list[Entry]:
    """Papers first, then the pieces that are lifted to methods: those that give an example of themselves."""
    made = [(make, example) for name, make in catalogue().items() if (example := _example(name, make))]
    found = [_entry(make, example) for make, example in made]
    order = list(KINDS)
    return sorted(found, key=lambda entry: (order.index(entry.kind), entry.spec))


def _entry(make: Callable[..., Any], spec: str) -> Entry:
    bases = inspect.getmro(make) if inspect.isclass(make) else (type(make),)
    kind = next(kind for kind, base in KINDS.items() if base in bases)
    bits = 8 * lift(spec).nbytes(MATRIX) / MATRIX.numel
    if isinstance(make, Paper):
        return Entry(spec, kind, make.sends, bits, make.paper)
    return Entry(spec, kind, _headline(make), bits, "")


def _example(name: str, make: Callable[..., Any]) -> str | None:
    """A call of this name: without arguments, or the first example that the class gives, or None."""
    parameters = inspect.signature(make).parameters.values()
    if all(parameter.default is not inspect.Parameter.empty for parameter in parameters):
        return f"{name}()"
    return next(iter(getattr(make, "examples", ())), None)


def _headline(make: Callable[..., Any]) -> str:
    """What the first line of its module's docstring says, without the name."""
    first = (sys.modules[make.__module__].__doc__ or "").strip().split("\n")[0]
    said = first.partition(": ")[2] or first
    return said.split(". ")[0].rstrip(".")
