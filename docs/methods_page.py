"""docs/methods.md: every registered name, what it sends and where it is from, and what was measured of it."""

from __future__ import annotations

from itertools import groupby

from docs.tables import table
from laconic.cli.entries import TITLES, Entry, entries, kept, pieces
from laconic.cli.methods import STATUS, times

MEASURED = (
    *("spec", "bits, matrices", "bits, all", "times smaller"),
    *("error", "of it bias", "bound", "unbiased"),
)
HEAD = """\
# Every method: what it sends, what it loses

Written by `make docs` from what is registered and from the figures that `python -m benchmarks.methods` has
left; `laconic methods` shows the same, and `laconic methods NAME` one in full.

**Measured** on the gradient in `benchmarks/results/{gradient}` (`python -m benchmarks.gradient`): a network
of {parameters:,} parameters, 100 steps into learning handwritten digits, one worker's batch.

- *bits*: payload that a worker really hands to collectives in a step, a parameter, on {ranks} ranks that each
  hold this gradient, mean over {steps} steps after any warm-up; of the matrices alone, and of all tensors
  together. Tensors of one dimension stay dense in nearly all methods; they are few here, as in most networks.
- *error*: mean of |C(x) - x|² / |x|² over {keys} keys, for the matrices; *bias*: what of it remains in the
  mean of C(x): nothing where C is unbiased, all where it is not random. Error feedback sends it later.
- *bound*: the most that the error can be, by the bounds that the codecs declare for all x; `a` marks one that
  is absolute, independent of |x|.

**Status** of a paper here:

"""


def page() -> str:
    """The whole page."""
    measure = {name: value for name, value in kept().items() if name != "figures"}
    parts = [HEAD.format(**measure).rstrip("\n"), ""]
    parts += [f"- *{state}*: {words}" for state, words in STATUS.items() if state != "-"]
    for kind, found in groupby(entries(), key=lambda entry: entry.kind):
        listed = list(found)
        parts += ["", f"## {TITLES[kind]}", "", *about(listed)]
        if any(entry.measured for entry in listed):
            parts += ["", *measured(listed)]
    for title, named in pieces().items():
        rows = [[f"`{name}`", said] for name, said in named.items()]
        parts += ["", f"## {title}", "", *table(["name", "is"], rows)]
    return "\n".join(parts) + "\n"


def about(listed: list[Entry]) -> list[str]:
    """One line a name."""
    rows = []
    for name, specs in groupby(listed, key=lambda entry: entry.name):
        entry, *others = specs
        needs = " or ".join(dict.fromkeys(each.needs for each in (entry, *others) if each.needs))
        rows.append([f"`{name}`", entry.sends, needs, entry.paper, entry.status])
    return table(["name", "what it sends", "needs", "paper", "status"], rows)


def measured(listed: list[Entry]) -> list[str]:
    """One line a spec."""
    rows = []
    for entry in listed:
        figures = entry.measured
        if figures is None:
            continue
        lost = ("", "", "")
        if figures.error is not None and figures.bias is not None and figures.bound is not None:
            share = f"{100 * figures.bias / figures.error:.0f} %" if figures.error else ""
            lost = (f"{figures.error:.3g}", share, f"{figures.bound:.3g}{' a' if figures.absolute else ''}")
        said = {None: "", True: "yes", False: "no"}[entry.unbiased]
        size = (f"{figures.matrix_bits:.3g}", f"{figures.bits:.3g}", times(32 / figures.matrix_bits))
        rows.append([f"`{entry.spec}`", *size, *lost, said])
    return table(MEASURED, rows)
