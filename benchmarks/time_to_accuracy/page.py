"""docs/time_to_accuracy.md and its pictures: seconds to a target, from results/time_to_accuracy/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.tables import spread, table
from benchmarks.time_to_accuracy.__main__ import (
    GOALS,
    LINKS,
    LOOK,
    MACHINES,
    METHODS,
    MORE,
    SEEDS,
    STEPS,
    WORKERS,
    Goal,
    Row,
    Run,
)
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

DENSE = METHODS[0]
HEAD = f"""# Time to accuracy

`make docs` writes this page from the results of `python -m benchmarks.time_to_accuracy`.

{WORKERS} workers train for {STEPS:,} steps on [emulated hosts](lab.md) of one machine, each with a link of
the rate in the heading, by SGD with Nesterov momentum at a learning rate that falls to 0 as a cosine, the
same for all methods: of some, such as DiLoCo, the best rate is [another](own_rates.md). Another target may
change the order: the pictures show all of each training. *Seconds*
of training until a test, one in {LOOK} steps, first reaches the target: mean ± standard error over seeds;
tests themselves do not count. *Sooner*: than dense training of the same seeds. Hosts share the machine's
cores, so a step's compute takes longer than on separate machines, and a method gains less.

In the tables without a machine `auto()` stopped at 4 bits. With SGD it may now send one value in a hundred,
as in the table of another machine. Seconds of different machines do not compare.
"""
TOLD = ("method", "seconds", "sooner", "accuracy at last, %", "ms a step", "sent, kB a step", "seeds")


def page() -> str:
    """The page, of the trainings that are done."""
    lines = [HEAD]
    for goal in GOALS:
        if started(goal):
            lines += [f"![Test accuracy on {goal.task} by seconds of training]({picture_of(goal)})", ""]
        for link in LINKS:
            for machine in ("", *MACHINES):
                if found := [*rows(goal, link, machine)]:
                    heading = f"## {goal.task}, `{goal.model}`, to {goal.target:g} %, {link}"
                    heading += f", {MACHINES[machine]}" if machine else ""
                    lines += [heading, "", *table(TOLD, found), ""]
    return "\n".join(lines)


def done() -> bool:
    """Whether there is a training to tell of."""
    return any(map(started, GOALS))


def started(goal: Goal) -> bool:
    """Whether there is a training of a goal."""
    return any(of(goal, link, spec) for link in LINKS for spec in METHODS)


def picture_of(goal: Goal) -> str:
    """The file of a goal's picture."""
    return f"time_to_accuracy-{goal.task}.svg"


def pictures(folder: Path) -> dict[Path, Callable[[], str]]:
    """What makes each picture."""
    return {folder / picture_of(goal): lambda goal=goal: picture(goal) for goal in GOALS if started(goal)}


def of(goal: Goal, link: str, spec: str, machine: str = "") -> dict[int, Row]:
    """The trainings of a method that are done, by seed."""
    found = {seed: Run(goal, link, spec, seed, machine).read() for seed in SEEDS}
    return {seed: row for seed, row in found.items() if row is not None}


def rows(goal: Goal, link: str, machine: str = "") -> Iterator[Sequence[str]]:
    """A row for each method."""
    dense = of(goal, link, DENSE, machine)
    for spec in (*METHODS, *MORE):
        if its := of(goal, link, spec, machine):
            yield (
                f"`{spec}`",
                *reached(its, dense),
                spread([100 * row["accuracy"] for row in its.values()]),
                f"{1000 * statistics.mean(row['step_s'] for row in its.values()):.0f}",
                f"{1000 * statistics.mean(row['wire_mb'] for row in its.values()):,.1f}",
                str(len(its)),
            )


def reached(its: dict[int, Row], dense: dict[int, Row]) -> tuple[str, str]:
    """Seconds, and how many times sooner than dense.

    >>> reached({0: {"reach_s": 10.0}, 1: {"reach_s": 10.0}}, {0: {"reach_s": 40.0}, 1: {"reach_s": 20.0}})
    ('10.0 ± 0.0', '3.0 times')
    >>> reached({0: {"reach_s": 10.0}, 1: {"reach_s": None}}, {})
    ('not reached with 1 of 2 seeds', '-')
    """
    seconds = {seed: row["reach_s"] for seed, row in its.items()}
    missed = sum(value is None for value in seconds.values())
    if missed:
        return f"not reached with {missed} of {len(its)} seeds", "-"
    both = [seed for seed in its if seed in dense and dense[seed]["reach_s"] is not None]
    told = spread([*seconds.values()], 1)
    if not both:
        return told, "-"
    sooner = sum(dense[seed]["reach_s"] for seed in both) / sum(seconds[seed] for seed in both)
    return told, f"{sooner:.1f} times"


def picture(goal: Goal) -> str:
    """Test accuracy by seconds of training, a panel for each link: means over the seeds that are done."""
    panels = []
    for link, left in zip(LINKS, (56, 482), strict=True):
        curves = [curve(of(goal, link, spec)) for spec in METHODS]
        if any(len(each.x) for each in curves):
            panels.append(panel(curves, left, f"over {link}", log_x=True, log_y=False, mark=goal.target))
    head = f"{goal.task}: test accuracy, %, by seconds of training"
    return framed(f"Test accuracy on {goal.task} by seconds of training", head, panels, METHODS)


def curve(its: dict[int, Row]) -> Curve:
    """The means over seeds at each test, none where nothing is done."""
    seconds, percent = (
        np.array([row[what] for row in its.values()] or [[]], dtype=np.float64).mean(axis=0)
        for what in ("seconds", "percent")
    )
    return Curve(seconds, percent, np.zeros_like(seconds))
