"""Accuracy of each method at its best learning rate, and at dense training's.

    python -m benchmarks.own_rates            all runs; continues where it stopped: 16 CPU hours
    python -m benchmarks.own_rates --only "sign()"    those of one method, after its baseline's
    python -m benchmarks.own_rates --quick    a few steps of each; nothing is kept

Four workers train SMALL_NET on CIFAR-10, DIGIT_NET on MNIST, and SMALL_GPT on Shakespeare (LACONIC_DATA names
the folder of all three). With the first seed, a method tries its family's usual rate, then twice and half of
the best, until both neighbours of the best are worse in test loss; the other seeds train at that rate.
Dense training of each family looks for its rate in the same way. `auto()` is not among them: it chooses by
the link, and threads have none.

Results by <task>/<method>-<rate>-<seed> are in benchmarks/own_rates/results.jsonl; `make docs` writes
docs/own_rates.md from them.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.machine import machine
from benchmarks.common.rates import next_rate
from benchmarks.common.results import Results, Row
from benchmarks.common.small_net import load_windows
from benchmarks.common.workers import Data, train
from benchmarks.own_rates.families import FAMILIES, SEEDS, Family
from laconic.core.errors import NonFiniteError
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import load
from laconic.tools.tasks.mnist import load as load_digits

RUNS = Results(Path(__file__).with_name("results.jsonl"))
DIVERGED = "diverged"


@dataclass(frozen=True)
class Run:
    """One training. `searches`: a shorter one, which looks for the rate."""

    family: Family
    spec: str
    rate: float
    seed: int
    searches: bool = False

    @property
    def key(self) -> str:
        folder = f"{self.family.folder}-search" if self.searches else self.family.folder
        return f"{folder}/{slug(self.spec)}-{self.rate:g}-{self.seed}"

    @property
    def steps(self) -> int:
        return (self.family.search_steps or self.family.steps) if self.searches else self.family.steps

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def searching(family: Family, spec: str, rate: float) -> Run:
    """Return the run that tries a rate."""
    return Run(family, spec, rate, SEEDS[0], searches=family.search_steps is not None)


def loss_of(row: Row) -> float:
    """Return a key that is smaller for a better rate."""
    loss: float = math.inf if row.get(DIVERGED) else row["test_loss"]
    return loss


def tried(family: Family, spec: str) -> dict[float, Row]:
    """The runs of the first seed that are done, by rate, in the order of the search."""
    found: dict[float, Row] = {}
    while (rate := next_rate(losses_of(found), family.usual)) is not None:
        row = searching(family, spec, rate).read()
        if row is None:
            break
        found[rate] = row
    return found


def losses_of(rows: dict[float, Row]) -> dict[float, float]:
    """The loss of each rate."""
    return {rate: loss_of(row) for rate, row in rows.items()}


def own_rate(family: Family, spec: str) -> float | None:
    """The method's own rate; None during the search."""
    losses = losses_of(tried(family, spec))
    if next_rate(losses, family.usual) is not None:
        return None
    return min(losses, key=lambda rate: losses[rate])


def ended(spec: str, family: Family) -> dict[int, Row]:
    """Return the runs at the method's own rate, by seed, also those that have diverged."""
    rate = own_rate(family, spec)
    found = {} if rate is None else {seed: Run(family, spec, rate, seed).read() for seed in SEEDS}
    return {seed: row for seed, row in found.items() if row is not None}


def runs(spec: str, family: Family) -> dict[int, Row]:
    """Return those of `ended` that have not diverged."""
    return {seed: row for seed, row in ended(spec, family).items() if DIVERGED not in row}


def due(only: str | None = None) -> Iterator[Run]:
    """Yield the missing runs: searches first, then the other seeds. Store each before asking for the next.

    `only`: of this method and its baseline.
    """
    wanted = [
        (family, spec)
        for family in FAMILIES
        for spec in family.specs
        if only is None or spec == only or (spec == family.baseline and only in family.specs)
    ]
    for family, spec in wanted:
        while (rate := next_rate(losses_of(tried(family, spec)), family.usual)) is not None:
            yield searching(family, spec, rate)
    for seed in SEEDS:
        for family, spec in wanted:
            own = own_rate(family, spec)
            assert own is not None
            if seed in family.seeds(spec) and (run := Run(family, spec, own, seed)).read() is None:
                yield run


def do(run: Run, data: Data, steps: int | None = None) -> Row:
    """Train, and return the row, also of a run that diverges. `steps`: another number, for a trial."""
    steps = steps or run.steps
    try:
        row = train(run.family.problem, run.spec, run.rate, steps, run.seed, data)
    except NonFiniteError as error:
        row = {"spec": run.spec, "lr": run.rate, "seed": run.seed, "steps": steps, DIVERGED: str(error)}
    told = (
        f"accuracy {100 * row['accuracy']:.2f} %, loss {row['test_loss']:.4f}"
        if "accuracy" in row
        else DIVERGED
    )
    print(f"{run.spec:40} rate {run.rate:<8g} seed {run.seed}: {told}", flush=True)
    return row


def main() -> None:
    """Train the missing runs."""
    specs = list(dict.fromkeys(spec for family in FAMILIES for spec in family.specs))
    options = argparse.ArgumentParser(prog="benchmarks.own_rates")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--only", choices=specs, metavar="SPEC", help="one of: " + ", ".join(specs))
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = {"cifar10": dict(load()), "mnist": dict(load_digits()), "shakespeare": load_windows()}
    if given.quick:
        for family in FAMILIES:
            for spec in family.specs:
                if given.only in (None, spec):
                    do(Run(family, spec, family.usual, SEEDS[0]), data[family.task], steps=20)
        return
    for run in due(given.only):
        RUNS.put(run.key, do(run, data[run.family.task]) | {"machine": machine()})


if __name__ == "__main__":
    main()
