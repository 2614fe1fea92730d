"""Training in two regions over a wide-area link, also while one region is cut off.

    python -m benchmarks.wan                 all: an hour; continues where it stopped
    python -m benchmarks.wan --only "noloco(every=30)"    one method
    python -m benchmarks.wan --quick         a few steps of one method; nothing is kept

A region is a host of a lab (`laconic.tools.lab`) with two ranks. All packets between regions are late by the
link's delay, plus or minus its jitter, and some are lost; ranks of one region talk within their host. Four
ranks train a small GPT of 634,496 parameters on Shakespeare in bf16 autocast, 8 windows per rank and
step, by AdamW at the own rate of each method (`benchmarks.own_rates`), constant after 50 steps, until the
first rank's mean loss of 50 steps is at most 2.3, or for 15 minutes. LACONIC_DATA names the folder of the
text. Only work of the lowest priority may run beside it. For comparison, dense training by the two ranks of
one region alone, which need no link.

In trainings with a cut, the second region has no link for 60 s. A silent rank counts as lost after 30 s.

Results by <link>/<method> are in benchmarks/wan/results.jsonl; `make docs` writes docs/wan.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.own_rates.__main__ import own_rate
from benchmarks.own_rates.families import FAMILIES, STREAMING
from benchmarks.wan.figures import SECONDS, longest_pause, steps_during, time_to_loss
from benchmarks.wan.trial import IN_REGION, REGIONS, train
from laconic.tools.lab import Link, missing
from laconic.tools.report.ledger import slug

RUNS = Results(Path(__file__).with_name("results.jsonl"))
TARGET, STEPS, MOST_S = 2.3, 3000, 900.0
CUT_S = 60.0
(FAMILY,) = (each for each in FAMILIES if each.folder == "shakespeare")
DENSE = "dense()"
SPECS = (
    DENSE,
    "cgx(bits=4)",
    "diloco(every=30, momentum=0.9)",
    STREAMING,
    "sparseloco(every=10, density=0.05)",
    "noloco(every=30)",
    "by_machine(diloco(every=30, momentum=0.9), ranks_per_node=2)",
)
STRATEGIES = SPECS[2:]
NEAR, FAR, ALONE = "50 ms, 200 Mbit/s", "150 ms, 20 Mbit/s", "alone"
LINKS = {
    NEAR: Link("200mbit", delay="50ms", jitter="5ms", loss="0.01%"),
    FAR: Link("20mbit", delay="150ms", jitter="15ms", loss="0.01%"),
}


@dataclass(frozen=True)
class Run:
    """One training. `cut`: whether the second region is cut off for a while. `link`: ALONE for one region."""

    link: str
    spec: str
    cut: bool = False

    @property
    def key(self) -> str:
        words = self.link.replace(" ms, ", "ms-").replace(" Mbit/s", "mbit")
        return f"{words}{'-cut' if self.cut else ''}/{slug(self.spec)}"

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def runs() -> Iterator[Run]:
    """Yield all: those without a cut first."""
    yield Run(ALONE, DENSE)
    for link in LINKS:
        yield from (Run(link, spec) for spec in SPECS)
    yield from (Run(NEAR, spec, cut=True) for spec in STRATEGIES)


def rate_of(spec: str) -> float:
    """Return the method's own rate. Raises `SystemExit` if it is not known."""
    rate = own_rate(FAMILY, spec)
    if rate is None:
        raise SystemExit(f"the rate of {spec} is not known: run python -m benchmarks.own_rates")
    return rate


def measure(run: Run, steps: int = STEPS) -> Row:
    """Train; return the row to store."""
    words = [run.spec, str(rate_of(run.spec)), str(steps), str(MOST_S), str(TARGET)]
    regions = 1 if run.link == ALONE else REGIONS
    with tempfile.TemporaryDirectory() as folder:
        link = LINKS.get(run.link, LINKS[NEAR])
        records, cut = train(link, words, CUT_S if run.cut else None, Path(folder), regions)
    row: Row = {
        "spec": run.spec,
        "link": run.link,
        "lr": rate_of(run.spec),
        "target": TARGET,
        "cut": cut,
        **time_to_loss(records[0], TARGET),
        "steps": [len(each["done"]) for each in records],
        "seconds": records[0]["done"][-1][SECONDS],
        "returned": len(records) == regions * IN_REGION,
        "alike": len({each["model"] for each in records}) == 1,
        "regroups": [each["regroups"] for each in records],
        "pause_s": [longest_pause(each, cut) for each in records],
        "during_cut": [steps_during(each, cut) for each in records] if cut else None,
        "network": records[0]["network"],
    }
    return row | {"machine": machine()}


def main() -> None:
    """Do the trainings that have no row yet."""
    options = argparse.ArgumentParser(prog="benchmarks.wan")
    options.add_argument("--only", choices=SPECS, metavar="SPEC", help="one of: " + ", ".join(SPECS))
    options.add_argument("--quick", action="store_true", help="a few steps of one method; nothing is kept")
    given = options.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        return
    if given.quick:
        run = Run(NEAR, given.only or STRATEGIES[0])
        print_row(run, measure(run, steps=60))
        return
    for run in runs():
        if given.only in (None, run.spec) and run.read() is None:
            RUNS.put(run.key, row := measure(run))
            print_row(run, row)


def print_row(run: Run, row: Row) -> None:
    """Print a line on a training."""
    time_s = "not reached" if row["reach_s"] is None else f"{row['reach_s']:.0f} s, {row['reach_mb']:.1f} MB"
    cut = f", {row['during_cut']} steps while cut off" if row["cut"] else ""
    print(f"{run.link:18} {run.spec:36} {time_s}, {row['steps']} steps{cut}", flush=True)


if __name__ == "__main__":
    main()
