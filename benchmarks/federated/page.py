"""docs/federated_accuracy.md and its pictures: from benchmarks/federated/results.jsonl."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.common.tables import table
from benchmarks.federated.__main__ import LONGER, PLAN, RATES, ROUNDS, RUNS, SCHEMES, SEEDS, group_of
from laconic.tools.report.curves import Curve
from laconic.tools.report.legend import LIGHT, WIDTH
from laconic.tools.report.picture import HEIGHT, panel, style
from laconic.tools.tasks import find

SHARE = 0.95  # of FedAvg's accuracy: the target
WINDOW = 3  # tests, whose mean must reach it: with two classes a client, single tests jump
ROW = 18  # pixels of a line of the legend
HEAD = """\
# Federated schemes: accuracy against bytes

{clients} clients of two classes each (`{by}`), {per_round} in each of {rounds} rounds, {steps} local
steps of {batch} examples by plain SGD at {rate:g}: the same clients, batches and first model for all schemes.
Clients create the first model locally. Bytes are the sent bytes of all clients' messages; clients that missed
rounds receive the missed updates.

`make docs` writes this page from the results of `python -m benchmarks.federated`: {found} of {planned}
trainings are done. Accuracy: mean ± standard error over seeds. Target: {share:.0%} of FedAvg's accuracy with
the same seed, by the mean of {window} tests in a row; bytes until then are the mean over the seeds that
reached it."""
Trainings = dict[str, list[dict[str, Any]]]  # by scheme, one of each seed


def trainings(task: str, rounds: int = ROUNDS) -> Trainings:
    """What is there of a task, in the order of SCHEMES, then of seeds."""
    found: Trainings = {}
    for one in RUNS.rows(group_of(task, rounds)):
        found.setdefault(one["spec"], []).append(one)
    return {spec: found[spec] for spec in SCHEMES if spec in found}


def page() -> str:
    """The whole page."""
    every = {task: trainings(task) for task in RATES}
    there = sum(len(seeds) for found in every.values() for seeds in found.values())
    lines = [
        HEAD.format(
            clients=PLAN.clients,
            by=PLAN.by,
            per_round=PLAN.per_round,
            rounds=PLAN.rounds,
            steps=PLAN.local_steps,
            batch=PLAN.batch,
            rate=PLAN.lr,
            found=there,
            planned=len(RATES) * len(SCHEMES) * SEEDS,
            share=SHARE,
            window=WINDOW,
        )
    ]
    heads = (
        "scheme",
        "seeds",
        "accuracy, %",
        "MB up",
        "MB down",
        "smaller",
        "reached the target",
        "smaller until then",
    )
    for task, found in every.items():
        if not found:
            continue
        lines += [
            "",
            f"## {find(task).title}",
            "",
            f"![](federated-{task}.svg)",
            "",
            *table(heads, rows(found)),
        ]
        if longer := trainings(task, LONGER):
            lines += ["", f"The same for {LONGER:,} rounds:", "", *table(heads, rows(longer))]
    return "\n".join(lines) + "\n"


def rows(found: Trainings) -> list[tuple[str, ...]]:
    """One of each scheme."""
    return [cells(spec, seeds, found.get(SCHEMES[0], [])) for spec, seeds in found.items()]


def cells(spec: str, seeds: list[dict[str, Any]], dense: list[dict[str, Any]]) -> tuple[str, ...]:
    """One row. Ratios are against FedAvg with the same seeds."""
    baseline = {one["seed"]: one for one in dense}
    paired = [(one, baseline[one["seed"]]) for one in seeds if one["seed"] in baseline]
    total = [both(other)[-1] / both(one)[-1] for one, other in paired]
    until = [
        mine_theirs[1] / mine_theirs[0]
        for one, other in paired
        if (mine_theirs := (bytes_until(one, other), bytes_until(other, other))) and all(mine_theirs)
    ]
    accuracies = [100 * one["accuracy"][-1] for one in seeds]
    spread = f" ± {statistics.stdev(accuracies) / len(seeds) ** 0.5:.2f}" if len(seeds) > 1 else ""
    return (
        f"`{spec}`",
        str(len(seeds)),
        f"{statistics.mean(accuracies):.2f}{spread}",
        f"{statistics.mean(one['up'][-1] for one in seeds) / 1e6:,.1f}",
        f"{statistics.mean(one['down'][-1] for one in seeds) / 1e6:,.1f}",
        f"{statistics.mean(total):.1f} times" if total else "-",
        f"{len(until)} of {len(paired)}",
        f"{statistics.mean(until):.1f} times" if until else "-",
    )


def both(one: dict[str, Any]) -> list[int]:
    """Bytes up and down, at each test."""
    return [up + down for up, down in zip(one["up"], one["down"], strict=True)]


def bytes_until(one: dict[str, Any], dense: dict[str, Any]) -> float:
    """Bytes both ways until the target of this FedAvg training; 0 where it was not reached."""
    target = SHARE * statistics.mean(dense["accuracy"][-WINDOW:])
    smooth = np.convolve(one["accuracy"], np.ones(WINDOW) / WINDOW, mode="valid")
    reached = np.nonzero(smooth >= target)[0]
    return float(both(one)[reached[0] + WINDOW - 1]) if len(reached) else 0.0


def pictures(folder: Path) -> dict[Path, Any]:
    """What draws each task's picture that has trainings."""
    return {
        folder / f"federated-{task}.svg": lambda task=task: picture(task) for task in RATES if trainings(task)
    }


def picture(task: str) -> str:
    """The SVG document: test error by bytes and by round."""
    found = trainings(task)
    height = HEIGHT + ROW * (-(-len(found) // 2) - 1)
    by_bytes, by_round = [], []
    for seeds in found.values():
        errors = np.array([[100 * (1 - value) for value in one["accuracy"]] for one in seeds]).mean(axis=0)
        nothing = np.zeros_like(errors)
        by_bytes.append(Curve(np.array([both(one) for one in seeds]).mean(axis=0) / 1e6, errors, nothing))
        by_round.append(Curve(np.array(seeds[0]["round"], dtype=np.float64), errors, nothing))
    title = f"{find(task).title}: {PLAN.clients} clients of 2 classes, {PLAN.per_round} a round"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Test error by bytes and by round: {escape(title)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(title)}</text>',
        panel(by_bytes, 56, "test error, %, by MB both ways, all clients", log_x=True),
        panel(by_round, 482, "test error, %, by round", log_x=False),
    ]
    for i, spec in enumerate(found):
        x, y = 56 + 426 * (i % 2), HEIGHT - 24 + ROW * (i // 2)
        short = spec if len(spec) <= 46 else f"{spec[:44]}…"
        parts.append(f'<path class="c{i % len(LIGHT)}" d="M{x} {y - 4}h18"/>')
        parts.append(f'<text class="spec" x="{x + 25}" y="{y}">{escape(short)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
