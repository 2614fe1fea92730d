"""Time to accuracy over emulated links: seconds of training until a test reaches a target.

    python -m benchmarks.time_to_accuracy                  all of it: 3 hours; goes on where it stopped
    python -m benchmarks.time_to_accuracy --link 100mbit --task cifar10 --seed 0    a slice: 20 minutes
    python -m benchmarks.time_to_accuracy --machine NAME   on a machine whose rows stand apart
    python -m benchmarks.time_to_accuracy --quick          a few steps of each; nothing is kept

Four workers on emulated hosts of this machine train by `laconic lab -- laconic train`, STEPS steps at a rate
that falls to 0 as a cosine, with a test every LOOK steps. LACONIC_DATA names the folder of the data. Each
training is a command of its own, and all methods of a seed are done before the next seed. Cores are shared,
so a step's compute takes longer than on machines of its own, and compression gains less here than there.

Results by <task>-<link>/<method>-<seed> are in benchmarks/time_to_accuracy/results.jsonl: seconds to the
target, accuracy by seconds, bytes and seconds of a step. `make docs` writes docs/time_to_accuracy.md.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.steps.contenders import AUTO
from laconic.tools.report.ledger import slug
from laconic.tools.report.reaching import accuracy_by_second
from laconic.tools.report.series import read_run
from laconic.tools.report.summary import plain, summarise

RUNS = Results(Path(__file__).with_name("results.jsonl"))
WORKERS, STEPS, LOOK, LIMIT_S = 4, 1500, 25, 3600
SEEDS, LINKS = (0, 1, 2), ("100mbit", "1gbit")
MACHINES = {"xeon": "on an Intel Xeon at 2.5 GHz, two CPUs of one core"}
METHODS = (
    "dense()",
    "fp16()",
    "powersgd(rank=2)",
    "cgx(bits=4)",
    "dgc(density=0.01, warmup_steps=150)",
    "auto()",
    AUTO,  # with the sparse candidates
    "osgp()",
    "diloco(every=20, momentum=0.9)",
    "sparseloco(every=10, density=0.05)",
)
MORE = ("stc(density=0.01)", "stc(density=0.05)")  # on other machines than the first


@dataclass(frozen=True)
class Goal:
    """A task, and the test accuracy in percent that counts."""

    task: str
    model: str
    target: float
    lr: float | None = None


GOALS = (Goal("cifar10", "cnn", 60.0, 0.05), Goal("shakespeare", "lstm", 48.0))


@dataclass(frozen=True)
class Run:
    """One training."""

    goal: Goal
    link: str
    spec: str
    seed: int
    machine: str = ""  # that of most rows; seconds of different machines do not compare

    @property
    def key(self) -> str:
        place = "-".join(filter(None, (self.goal.task, self.link, self.machine)))
        return f"{place}/{slug(self.spec)}-{self.seed}"

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def runs(machine: str = "") -> Iterator[Run]:
    """All of them: those of a seed before the next seed."""
    for seed in SEEDS:
        for link in LINKS:
            for goal in GOALS:
                specs = (*METHODS, *MORE) if machine else METHODS
                yield from (Run(goal, link, spec, seed, machine) for spec in specs)


def command(run: Run, out: Path, steps: int) -> list[str]:
    """The training as a user would type it."""
    goal, laconic = run.goal, [sys.executable, "-m", "laconic.tools.cli"]
    lab = [
        *laconic,
        "lab",
        "--hosts",
        str(WORKERS),
        "--link",
        run.link,
        "--once",
        "--timeout",
        str(LIMIT_S),
        "--",
    ]
    words = ["train", goal.task, "--model", goal.model, "--workers", str(WORKERS), "--with", run.spec]
    words += [
        "--against",
        run.spec,
        "--seed",
        str(run.seed),
        "--steps",
        str(steps),
        "--eval-every",
        str(LOOK),
    ]
    words += ["--target", f"{goal.target:g}", "--out", str(out), "--name", "run"]
    return [*lab, *laconic, *words, *([] if goal.lr is None else ["--lr", str(goal.lr)])]


def measured(run: Run, steps: int = STEPS) -> Row:
    """Train, and give what is to be kept."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a lab has no name server, which c10d tells
        ended = subprocess.run(command(run, out, steps), env=env, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{run}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        trained = read_run(out / "run")
    row, curve = summarise(trained)[0], accuracy_by_second(trained.methods[0])
    reached = row.reach_s.mean
    figures: Row = {
        "spec": run.spec,
        "task": run.goal.task,
        "link": run.link,
        "seed": run.seed,
        "steps": steps,
        "workers": WORKERS,
        "target": run.goal.target,
        "reach_s": None if math.isnan(reached) else reached,
        "accuracy": row.accuracy.mean,
        "step_s": row.step_s.mean,
        "wire_mb": row.wire_mb,
    }
    curves = {"seconds": curve.x.round(2).tolist(), "percent": curve.y.round(3).tolist()}
    return plain(figures | curves) | {"machine": machine()}


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.time_to_accuracy")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--link", choices=LINKS)
    options.add_argument("--task", choices=[goal.task for goal in GOALS])
    options.add_argument("--machine", choices=[*MACHINES], default="", help="default: that of most rows")
    every = (*METHODS, *MORE)
    options.add_argument(
        "--only", action="append", choices=every, metavar="SPEC", help="one of: " + ", ".join(every)
    )
    options.add_argument("--seed", type=int, choices=SEEDS)
    given = options.parse_args()
    wanted = {"link": given.link, "seed": given.seed}
    for run in runs(given.machine):
        chosen = all(value is None or getattr(run, name) == value for name, value in wanted.items())
        chosen = chosen and given.task in (None, run.goal.task) and run.spec in (given.only or every)
        if not chosen or run.read() is not None:
            continue
        row = measured(run, 2 * LOOK if given.quick else STEPS)
        if not given.quick:
            RUNS.put(run.key, row)
        told = "not reached" if row["reach_s"] is None else f"{row['reach_s']:.0f} s"
        print(
            f"{run.goal.task:11} {run.link:7} {run.spec:36} seed {run.seed}: {told} to {run.goal.target:g} %,"
            f" {100 * row['accuracy']:.2f} % at last, {1000 * row['step_s']:.0f} ms a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
