"""Accuracy at equal steps, on real data, with 4 or 8 workers and 3 seeds. Needs LACONIC_DATA.

    python -m benchmarks.accuracy                      all of it: hours on 2 cores; goes on where it stopped
    python -m benchmarks.accuracy --set methods        every method on 4 workers for 1,000 steps
    python -m benchmarks.accuracy --set reductions     those whose traffic does not grow, on 8 workers
    python -m benchmarks.accuracy --set strategies     local steps, gossip and leaders, on 8 workers, also on
                                                       shards that are not alike
    python -m benchmarks.accuracy --set densities      DGC at two densities for 2,000 (see densities.py)
    python -m benchmarks.accuracy --task cifar10 --only qsgd --seed 0    a slice of the methods
    python -m benchmarks.accuracy --budget-minutes 30  starts no training that would end later
    python -m benchmarks.accuracy --quick              a few steps of each, to see that it runs: a method on
                                                       one task, unless --task says which; keeps nothing

A training in benchmarks/accuracy/results.jsonl is not repeated. Every method is trained with one seed
before the next seed. `make docs` writes docs/accuracy.md from them; the pictures are drawn here.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from benchmarks.accuracy import densities
from benchmarks.accuracy.contenders import MODELS, SEEDS, SETS, STEPS
from benchmarks.accuracy.scatter import scatter
from benchmarks.accuracy.standings import standings
from benchmarks.accuracy.trials import Trial, keep, train, trials
from laconic.core.errors import LaconicError
from laconic.tools.tasks.launcher import WorkerFailed, prepare_to_launch

DOCS = Path(__file__).parents[2] / "docs"
QUICK = 12  # steps


def race(chosen: list[Trial], console: Console, *, budget_s: float, quick: bool) -> int:
    """Do what is not done yet, within the budget; how many failed. A failure stores no row."""
    began, longest, failed = time.monotonic(), 0.0, 0
    due = [trial for trial in chosen if quick or not trial.done]
    for number, trial in enumerate(due, start=1):
        start = time.monotonic()
        if start - began + longest > budget_s:
            console.print(f"{len(due) - number + 1} trainings are left for another time")
            break
        try:
            found = train(trial, QUICK if quick else STEPS)
        except (LaconicError, WorkerFailed) as failure:
            failed += 1
            console.print(f"{number}/{len(due)} {trial}: {failure}", style="red", markup=False)
            continue
        longest = max(longest, time.monotonic() - start)
        said = "diverged" if found["accuracy"] is None else f"accuracy {100 * found['accuracy']:.2f} %"
        console.print(
            f"{number}/{len(due)} {trial}: {said}, {found['smaller']:.3g} times smaller,"
            f" {time.monotonic() - start:.0f} s",
            markup=False,
        )
        if not quick:
            keep(trial, found)
    return failed


def turn_of(trial: Trial) -> str:
    """The one task that this method is tried on where one is enough."""
    contenders = next(each for each in SETS.values() if trial.contender in each)
    return [*MODELS][contenders.index(trial.contender) % len(MODELS)]


def draw() -> None:
    """The pictures of what is there."""
    for task in MODELS:
        if found := standings(task):
            (DOCS / f"accuracy-methods-{task}.svg").write_text(scatter(task, found))


def main() -> int:
    """Train what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=(*SETS, "densities"), help="one of the sets")
    parser.add_argument("--task", choices=sorted(MODELS), help="of the methods: one task")
    parser.add_argument("--only", default="", help="of the methods: specs that begin so")
    parser.add_argument("--seed", type=int, choices=range(SEEDS), help="of the methods: one seed")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    failed = 0
    if options.set != "densities":
        prepare_to_launch()
        seed = 0 if options.quick and options.seed is None else options.seed
        chosen = [
            trial
            for name, contenders in SETS.items()
            for trial in trials(contenders)
            if options.set in (None, name)
            and options.task in (None, trial.task)
            and seed in (None, trial.seed)
            and trial.contender.text.startswith(options.only)
        ]
        if options.quick and options.task is None:
            chosen = [trial for trial in chosen if trial.task == turn_of(trial)]
        chosen = [*{trial.key: trial for trial in chosen}.values()]  # sets share dense trainings
        failed = race(chosen, console, budget_s=60 * options.budget_minutes, quick=options.quick)
        if not options.quick:
            draw()
    if options.set in (None, "densities"):
        for experiment in densities.EXPERIMENTS:
            if options.quick:
                run = densities.train(experiment, quick=True, console=console)
                console.print(f"{experiment.name}: {len(run.methods)} methods ran")
            elif experiment.read() is None:
                densities.measure(experiment, console)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
