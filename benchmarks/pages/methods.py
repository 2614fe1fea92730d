"""docs/methods.md: every registered name, what it sends, its paper, and its measured figures."""

from __future__ import annotations

from itertools import groupby

from benchmarks.pages.tables import table
from laconic.cli.entries import TITLES, CatalogueEntry, entries, measurements, pieces
from laconic.cli.methods import STATUS, times

MEASURED = (
    *("spec", "bits, matrices", "bits, all", "times smaller"),
    *("error", "bias share", "bound", "unbiased"),
)
HEAD = """\
# Every method: what it sends, what it loses

`make docs` writes this page from the registry and the figures of `python -m benchmarks.methods`.
`laconic methods` shows the same list, and `laconic methods NAME` all about one name.

**Measured** on the gradient in `benchmarks/results/{gradient}` (`python -m benchmarks.gradient`): one
worker's batch after 100 training steps on handwritten digits, with a network of {parameters:,} parameters.

- *bits*: bits per parameter that a worker hands to collectives in a step. {ranks} ranks each hold this
  gradient; mean over {steps} steps after any warm-up; for the matrices alone, and for all tensors.
  One-dimensional tensors stay dense in nearly all methods; they are few here, as in most networks.
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
    parts += [f"- *{state}*: {words}" for state, words in STATUS.items() if state != "-"]
    for kind, found in groupby(entries(), key=lambda entry: entry.kind):
        listed = list(found)
        parts += ["", f"## {TITLES[kind]}", "", *about(listed)]
        if any(entry.measured for entry in listed):
            parts += ["", *measured(listed)]
    for title, named in pieces().items():
        rows = [[f"`{name}`", description] for name, description in named.items()]
        parts += ["", f"## {title}", "", *table(["name", "is"], rows)]
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
        size = (f"{figures.matrix_bits:.3g}", f"{figures.bits:.3g}", times(32 / figures.matrix_bits))
        rows.append([f"`{entry.spec}`", *size, *lost, unbiased])
    return table(MEASURED, rows)
