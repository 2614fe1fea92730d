"""Training in two regions over a wide-area link, also while one region is cut off.

    python -m benchmarks.wan                 all: an hour; continues where it stopped
    python -m benchmarks.wan --only "diloco(every=30)"    one method
    python -m benchmarks.wan --quick         a few steps of one method; nothing is kept

A region is a host of a lab (`laconic.tools.lab`) with two ranks. All packets between regions are late by the
link's delay, plus or minus its jitter, and some are lost; ranks of one region talk within their host. Four
ranks train a small GPT of 0.8 million parameters on Shakespeare in bf16 autocast, 8 windows per rank and
step, by AdamW at the own rate of each method (`benchmarks.own_rates`), constant after 50 steps, until the
first region's mean loss of 25 steps is at most 2.3. LACONIC_DATA names the folder of the text.

In trainings with a cut, the second region has no link for 60 s. A silent rank counts as lost after 10 s.

Results by <link>/<method> are in benchmarks/wan/results.jsonl; `make docs` writes docs/wan.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.own_rates.__main__ import own_rate
from benchmarks.own_rates.families import FAMILIES, STREAMING
from benchmarks.wan.rank import SMOOTHED, WARM_UP
from laconic.core.errors import LabError
from laconic.tools.lab import Lab, Link, missing
from laconic.tools.lab.wiring import INTERFACE
from laconic.tools.report.ledger import slug

RUNS = Results(Path(__file__).with_name("results.jsonl"))
ROOT = Path(__file__).parents[2]
REGIONS, IN_REGION = 2, 2
TARGET, STEPS, MOST_S = 2.3, 3000, 240.0
CUT_S, LIMIT_S = 60.0, 1200.0
(FAMILY,) = (each for each in FAMILIES if each.folder == "shakespeare")
DENSE = "dense()"
SPECS = (
    DENSE,
    "diloco(every=30)",
    STREAMING,
    "sparseloco(every=10, density=0.05)",
    "noloco(every=30)",
    "by_machine(diloco(every=30), ranks_per_node=2)",
)
NEAR, FAR = "50 ms, 200 Mbit/s", "150 ms, 20 Mbit/s"
LINKS = {
    NEAR: Link("200mbit", delay="50ms", jitter="5ms", loss="0.01%"),
    FAR: Link("20mbit", delay="150ms", jitter="15ms", loss="0.01%"),
}


@dataclass(frozen=True)
class Run:
    """One training. `cut`: whether the second region is cut off for a while."""

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
    for link in LINKS:
        yield from (Run(link, spec) for spec in SPECS)
    yield from (Run(NEAR, spec, cut=True) for spec in SPECS if spec != DENSE)


def rate_of(spec: str) -> float:
    """Return the method's own rate. Raises `SystemExit` if it is not known."""
    rate = own_rate(FAMILY, spec)
    if rate is None:
        raise SystemExit(f"the rate of {spec} is not known: run python -m benchmarks.own_rates")
    return rate


def measured(run: Run, steps: int = STEPS) -> Row:
    """Train; return the row to store."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cut = trained(run, folder, steps)
        records = [json.loads((folder / f"record{rank}.json").read_text()) for rank in range(ranks())]
    first = records[:IN_REGION]
    losses, seconds = (
        [statistics.mean(each) for each in zip(*(record[name] for record in first), strict=False)]
        for name in ("losses", "seconds")
    )
    row: Row = {
        "spec": run.spec,
        "link": run.link,
        "lr": rate_of(run.spec),
        "target": TARGET,
        "cut": cut,
        **reached(losses, seconds, records),
        "steps": [len(each["losses"]) for each in records],  # done by each rank
        "seconds": max(each["seconds"][-1] for each in records),
        "alike": len({each["model"] for each in records}) == 1,
        "regroups": [each["regroups"] for each in records],
        "pause_s": [longest_pause(each, cut) for each in records],
        "during_cut": [during(each, cut) for each in records] if cut else None,
    }
    return row | {"machine": machine()}


def reached(losses: list[float], seconds: list[float], records: list[Row]) -> Row:
    """Return when the mean loss of a region was at most TARGET, and MB that it had sent by then."""
    for step in range(WARM_UP + SMOOTHED, len(losses)):
        if statistics.mean(losses[step - SMOOTHED : step]) <= TARGET:
            sent = records[0]["sent"]
            mb = (sent[step - 1] - sent[0]) / 1e6
            return {"reach_s": seconds[step - 1], "reach_steps": step, "reach_mb": mb}
    last = statistics.mean(losses[-SMOOTHED:])
    return {"reach_s": None, "reach_steps": None, "reach_mb": None, "last_loss": last}


def longest_pause(record: Row, cut: list[float] | None) -> float:
    """Return the longest time between two steps, with a cut from its beginning."""
    begin, seconds = 0.0 if cut is None else cut[0] - record["began"], record["seconds"]
    return max(after - before for before, after in pairwise(seconds) if after >= begin)


def during(record: Row, cut: list[float]) -> int:
    """Return the number of steps that ended while the region was cut off."""
    down, up = (each - record["began"] for each in cut)
    return sum(down <= each < up for each in record["seconds"])


def ranks() -> int:
    """Return the number of ranks."""
    return REGIONS * IN_REGION


def trained(run: Run, folder: Path, steps: int) -> list[float] | None:
    """Train; return when the region was cut off and when it was back, in seconds of `time.time`."""
    words = [str(folder), run.spec, str(rate_of(run.spec)), str(steps), str(MOST_S), str(TARGET)]
    command = [sys.executable, "-m", "benchmarks.wan.rank", *words]
    if run.cut:
        (folder / "cut").touch()
    pipes = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    with Lab(REGIONS, LINKS[run.link]) as lab:
        jobs = [
            lab.start(rank // IN_REGION, command, env=place(lab, rank), **pipes) for rank in range(ranks())
        ]
        try:
            cut = cut_off(lab, folder, jobs) if run.cut else None
            for job in jobs:
                _, errors = job.communicate(timeout=LIMIT_S)
                if job.returncode:
                    raise LabError(f"{run}: exit code {job.returncode}\n{errors[-3000:]}")
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    return cut


def place(lab: Lab, rank: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of a region."""
    host, local = divmod(rank, IN_REGION)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": ranks(),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": IN_REGION,
        "OMP_NUM_THREADS": 1,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return lab.place(host) | {name: str(value) for name, value in numbers.items()}


def cut_off(lab: Lab, folder: Path, jobs: list[subprocess.Popen[str]]) -> list[float]:
    """Take the second region's link down for a while, once all ranks train; return when, and until when."""
    while len([*folder.glob("begun*")]) < ranks() and not any(job.poll() for job in jobs):
        time.sleep(0.1)
    times = []
    for state, wait_s in (("down", CUT_S), ("up", 0.0)):
        if lab.start(1, ["ip", "link", "set", INTERFACE, state]).wait(timeout=20):
            raise LabError(f"the link does not go {state}")
        times.append(time.time())
        time.sleep(wait_s)
    (folder / "up").touch()
    return times


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
        told(Run(NEAR, given.only or SPECS[1]), measured(Run(NEAR, given.only or SPECS[1]), steps=60))
        return
    for run in runs():
        if given.only in (None, run.spec) and run.read() is None:
            RUNS.put(run.key, row := measured(run))
            told(run, row)


def told(run: Run, row: dict[str, Any]) -> None:
    """Print a line on a training."""
    time_s = "not reached" if row["reach_s"] is None else f"{row['reach_s']:.0f} s, {row['reach_mb']:.1f} MB"
    cut = f", {row['during_cut']} steps while cut off" if row["cut"] else ""
    print(f"{run.link:18} {run.spec:36} {time_s}, {row['steps']} steps{cut}", flush=True)


if __name__ == "__main__":
    main()
