"""Markdown tables, and figures in their cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

WIDTH = 110  # of a paragraph that a page wraps
EARLIER = """\
SGD's momentum was in the optimiser in these runs, as with `momentum='optimizer'`. By default, methods with
error feedback now apply it before the exchange, `powersgd` and `demo` excepted: the rows of the others are
to be measured again.
The table "SGD with momentum before compression" of own_rates.md has the new default."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table.

    >>> table(["a", "b"], [["1", "2"]])
    ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    return [_line(heads), "|" + "---|" * len(heads), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard error; one value has none.

    >>> spread([1.0, 3.0]), spread([2.0])
    ('2.00 ± 1.00', '2.00')
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return f"{statistics.mean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def plus_minus(figure: dict[str, float | None], scale: float = 1.0, digits: int = 2) -> str:
    """`mean ± standard error` of a figure; one seed has no error."""
    error = "" if figure["error"] is None else f" ± {scale * figure['error']:.{digits}f}"
    return f"{scale * (figure['mean'] or 0.0):.{digits}f}{error}"
