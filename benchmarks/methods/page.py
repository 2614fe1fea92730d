"""docs/methods.md: every registered name, what it sends, its paper, and its measured figures."""

from __future__ import annotations

from itertools import groupby

from benchmarks.common.tables import table
from benchmarks.pages.situations import sent_cells
from laconic.tools.cli.entries import (
    FEW,
    MANY,
    TITLES,
    CatalogueEntry,
    entries,
    headline,
    measurements,
    pieces,
)
from laconic.tools.cli.methods import STATUS

MEASURED = (
    *("spec", "message", f"N = {FEW}", f"N = {MANY}", "any N", f"smaller, {FEW}", f"smaller, {MANY}"),
    *("error", "bias share", "bound", "unbiased"),
)
HEAD = """\
# Every method: bytes and error

`make docs` writes this page from the registry and the figures of `python -m benchmarks.methods`.
`laconic methods --all` shows the same list, `laconic methods` one line a name, and `laconic methods NAME`
all about one name.

**Measured** on a stored gradient (`python -m benchmarks.gradient`): one
worker's batch after 100 training steps on handwritten digits, with a network of {parameters:,} parameters.

- *N = 4, N = 16*: bits per parameter that a worker puts on the wire per step in a group of N: every copy of a
  message, without packet headers, which add 5 to 7 % to large messages. Every rank holds this gradient; the
  figure is for the busiest rank, mean over {steps} steps after any warm-up, matrices only, since most methods
  leave the few vectors dense. A dense all-reduce sends 48 and 60 bits.
- *any N*: a formula, fitted to groups of 2, 4, 8 and 16. A gather sends its message to each of
  N - 1 ranks; an all-reduce sends 2 (N - 1) / N times its input. **Bold**: grows with every worker added.
  With `down=` it grows in networks as small as this one, because of headers, and [not in larger
  ones](scaling.md#through-servers-down).
- *smaller*: how many times less than a dense all-reduce in a group of the same size. **Bold**: it sends more.
- *message*: bits per parameter that a worker passes to collectives, each message counted once.
- *error*: mean of |C(x) - x|² / |x|² over {keys} keys, for the matrices; *bias share*: the part of it that
  remains in the mean of C(x): none if C is unbiased, all if it is deterministic. Error feedback sends it
  later.
- *bound*: the largest possible error, from the bounds that the codecs declare for all x; `a` marks an
  absolute bound, independent of |x|.

**Status** of an implementation:

"""


def page() -> str:
    """The whole page."""
    measure = {name: value for name, value in measurements().items() if name != "figures"}
    parts = [HEAD.format(**measure).rstrip("\n"), ""]
    parts += [f"- *{state}*: {words}" for state, words in STATUS.items()]
    for kind, found in groupby(entries(), key=lambda entry: entry.kind):
        listed = list(found)
        parts += ["", f"## {TITLES[kind]}", "", *about(listed)]
        if any(entry.measured for entry in listed):
            parts += ["", *measured(listed)]
    for title, named in pieces().items():
        rows = [
            [f"`{name}`", headline(make), getattr(make, "paper", "-"), getattr(make, "status", "own")]
            for name, make in named.items()
        ]
        parts += ["", f"## {title}", "", *table(["name", "is", "paper", "status"], rows)]
    return "\n".join(parts) + "\n"


def about(listed: list[CatalogueEntry]) -> list[str]:
    """One row per name."""
    rows = []
    for name, specs in groupby(listed, key=lambda entry: entry.name):
        entry, *others = specs
        needs = " or ".join(dict.fromkeys(each.needs for each in (entry, *others) if each.needs))
        rows.append([f"`{name}`", entry.sends, needs, entry.paper, entry.status])
    return table(["name", "what it sends", "needs", "paper", "status"], rows)


def measured(listed: list[CatalogueEntry]) -> list[str]:
    """One row per spec."""
    rows = []
    for entry in listed:
        figures = entry.measured
        if figures is None:
            continue
        lost = ("", "", "")
        if figures.error is not None and figures.bias is not None and figures.bound is not None:
            share = f"{100 * figures.bias / figures.error:.0f} %" if figures.error else ""
            lost = (f"{figures.error:.3g}", share, f"{figures.bound:.3g}{' a' if figures.absolute else ''}")
        unbiased = {None: "", True: "yes", False: "no"}[entry.unbiased]
        formula, *smaller = sent_cells(figures)
        sent = (f"{figures.sent_at(group):.3g}" for group in (FEW, MANY))
        size = (f"{figures.bits:.3g}", *sent, formula, *smaller)
        rows.append([f"`{entry.spec}`", *size, *lost, unbiased])
    return table(MEASURED, rows)
