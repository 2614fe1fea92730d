"""Outer momentum of DiLoCo by the optimiser inside, for docs/outer.md.

    python -m benchmarks.outer.inside            all runs; continues where it stopped: 15 CPU minutes
    python -m benchmarks.outer.inside --quick    a few steps of each; nothing is kept

Trainings are those of `benchmarks.own_rates`, at dense training's own rate. Results by
inside/<optimiser>/<method> are in benchmarks/outer/results.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.common.machine import machine
from benchmarks.common.results import Row
from benchmarks.common.small_net import load_windows
from benchmarks.common.tables import table
from benchmarks.outer.__main__ import RUNS
from benchmarks.own_rates.__main__ import DIVERGED, Run, do, own_rate
from benchmarks.own_rates.families import FAMILIES, WITH_MOMENTUM, Family
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import load

OUTER = ("lr=0.7, momentum=0.9", "lr=0.7, momentum=0.5", "lr=1.0, momentum=0.0")
(GPT,) = (each for each in FAMILIES if each.folder == "shakespeare")


@dataclass(frozen=True)
class Inside:
    """Trainings by one optimiser. `every`: steps between outer steps."""

    name: str
    family: Family
    every: tuple[int, ...]

    @property
    def runs(self) -> list[Run]:
        """Dense training, then DiLoCo with each outer step."""
        rate = own_rate(self.family, self.family.baseline)
        assert rate is not None, "dense training has its rate"
        specs = [self.family.baseline, *(spec_of(every, outer) for every in self.every for outer in OUTER)]
        return [Run(self.family, spec, rate, 0) for spec in specs]

    def key(self, spec: str) -> str:
        return f"inside/{self.name.lower()}/{slug(spec)}"


INSIDE = (Inside("SGD", WITH_MOMENTUM, (20, 100)), Inside("AdamW", GPT, (30, 100)))


def spec_of(every: int, outer: str) -> str:
    """Return DiLoCo with this outer step."""
    return f"diloco(every={every}, {outer})"


def section() -> Iterator[str]:
    """Yield the lines of the page; nothing before a run is done."""
    done = {inside: found for inside in INSIDE if (found := rows(inside))}
    if not done:
        return
    yield "## Outer momentum, by the optimiser inside"
    yield ""
    yield "Test accuracy at dense training's own rate, 4 workers, one seed: the trainings of"
    yield "[own rates](own_rates.md) with SGD and momentum on CIFAR-10, and with AdamW on Shakespeare."
    yield ""
    heads = ("inside", "rate", "steps", "every", "outer steps", "dense, %", *OUTER)
    yield from table(heads, [line for inside, found in done.items() for line in lines(inside, found)])
    yield ""


def rows(inside: Inside) -> dict[str, Row]:
    """Return the stored rows, by spec."""
    found = {run.spec: RUNS.get(inside.key(run.spec)) for run in inside.runs}
    return {spec: row for spec, row in found.items() if row is not None}


def lines(inside: Inside, found: dict[str, Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each number of steps between outer steps."""
    rate, steps = inside.runs[0].rate, inside.family.steps
    for every in inside.every:
        specs = (inside.family.baseline, *(spec_of(every, outer) for outer in OUTER))
        cells = (percent(found.get(spec)) for spec in specs)
        yield inside.name, f"{rate:g}", f"{steps:,}", f"{every}", f"{steps // every}", *cells


def percent(row: Row | None) -> str:
    """Return a cell of the table."""
    if row is None:
        return ""
    return DIVERGED if DIVERGED in row else f"{100 * row['accuracy']:.2f}"


def main() -> None:
    """Train the missing runs."""
    options = argparse.ArgumentParser(prog="benchmarks.outer.inside")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    given = options.parse_args()
    torch.set_num_threads(1)
    data = {"cifar10": dict(load()), "shakespeare": load_windows()}
    for inside in INSIDE:
        for run in inside.runs:
            if given.quick:
                do(run, data[run.family.task], steps=20)
            elif RUNS.get(inside.key(run.spec)) is None:
                RUNS.put(inside.key(run.spec), do(run, data[run.family.task]) | {"machine": machine()})


if __name__ == "__main__":
    main()
