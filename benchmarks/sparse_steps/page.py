"""docs/sparse_steps.md and its picture: steps that sparse methods need, from results/sparse_steps/."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.common.small_net import SMALL_NET
from benchmarks.common.tables import spread, table
from benchmarks.common.workers import WORKERS, Row
from benchmarks.sparse_reasons.page import section
from benchmarks.sparse_steps.__main__ import LENGTHS, LR, METHODS, SEEDS, Run
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

PICTURE = "sparse_steps.svg"
HEAD = f"""# How many steps a sparse method needs

`make docs` writes this page from the results of `python -m benchmarks.sparse_steps`.

With density d, an entry of the gradient is sent about once in 1 / d steps. A training must be several times
longer than 1 / d steps before it can match a dense one. How many times?
{WORKERS} workers train a small convolutional net on CIFAR-10, {SMALL_NET.batch} images a worker and step, by
SGD with momentum 0.9 at a rate that falls from {LR:g} to 0 as a cosine, whatever the length. Each is compared
with dense training of the same length, seed, first weights and batches: dense training at *its* length, not
the longest. Mean ± standard error over seeds.
"""
MOMENTUM = """\
`topk` and `stc` leave momentum to the optimiser here, by `momentum='optimizer'`, as their papers do. By
default it is applied before compression, and they lose less ([own rates](own_rates.md))."""
TOLD = ("method", "steps", "steps x density", "accuracy, %", "dense, %", "lost", "loss above dense's, %")
CURVES = tuple((method, density) for method in METHODS for density in LENGTHS)
Pair = tuple[Row, Row]  # a run, and dense training of the same length and seed


def page() -> str:
    """The page, of the runs that are done."""
    lines = [
        HEAD,
        MOMENTUM,
        "",
        f"![Accuracy and loss against steps times density]({PICTURE})",
        "",
        *claims(),
        "",
    ]
    lines += table((*TOLD, "MB a worker", "fewer", "seeds"), rows())
    return "\n".join([*lines, "", *section()])


def done() -> bool:
    """Whether there is a run to tell of."""
    return any(series(method, density) for method, density in CURVES)


def series(method: str, density: float) -> list[tuple[int, list[Pair]]]:
    """Steps, and the runs of this length that there are."""
    return [(steps, its) for steps in LENGTHS[density] if (its := pairs(method, density, steps))]


def named(method: str, density: float) -> str:
    """Return the spec without a warm-up."""
    return re.sub(r", warmup_steps=\d+", "", Run(method, density, 0, 0).spec)


def pairs(method: str, density: float, steps: int) -> list[Pair]:
    """What is done, by seed, where dense training is done too."""
    both = ((Run(method, density, steps, seed), Run("dense", 1, steps, seed)) for seed in SEEDS)
    read = ((run.read(), dense.read()) for run, dense in both)
    return [(run, dense) for run, dense in read if run is not None and dense is not None]


def lost(its: Sequence[Pair]) -> list[float]:
    """Points of accuracy below dense training."""
    return [100 * (dense["accuracy"] - run["accuracy"]) for run, dense in its]


def above(its: Sequence[Pair]) -> list[float]:
    """Percent of test loss above dense training's."""
    return [100 * (run["test_loss"] / dense["test_loss"] - 1) for run, dense in its]


def rows() -> Iterator[Sequence[str]]:
    """The table."""
    for method, density in CURVES:
        for steps, its in series(method, density):
            sent, whole = (statistics.mean(each[i]["sent_mb"] for each in its) for i in (0, 1))
            yield (
                f"`{named(method, density)}`",
                f"{steps:,}",
                f"{steps * density:g}",
                spread([100 * run["accuracy"] for run, _ in its]),
                spread([100 * dense["accuracy"] for _, dense in its]),
                spread(lost(its)),
                spread(above(its), 1),
                f"{sent:.4g}",
                f"{whole / sent:.0f} times",
                str(len(its)),
            )


def claims() -> Iterator[str]:
    """For each method and density: how the gap falls from the shortest training to the longest."""
    for method, density in CURVES:
        its = series(method, density)
        if len(its) > 1:
            (first, early), (last, late) = its[0], its[-1]
            told = f"`{named(method, density)}` loses {spread(lost(early))} points after {first:,} steps"
            yield f"- {told}, {spread(lost(late))} after {last:,} ({last * density:g} / density)."


def picture() -> str:
    """Accuracy and test loss in percent of dense training's, by steps times density."""
    accuracy, loss, names = [], [], []
    shown = {(method, density): its for method, density in CURVES if (its := series(method, density))}
    for (method, density), its in shown.items():
        x = np.array([steps * density for steps, _ in its], dtype=np.float64)
        names.append(f"{method}(density={density:g})")
        accuracy.append(curve(x, [100 * ratio(pairs, "accuracy") for _, pairs in its]))
        loss.append(curve(x, [100 * ratio(pairs, "test_loss") for _, pairs in its]))
    ticks = sorted({round(steps * density, 6) for (_, density), its in shown.items() for steps, _ in its})
    panels = [
        panel(accuracy, 56, "test accuracy, % of dense's", log_x=True, log_y=False, x_ticks=ticks, mark=100),
        panel(loss, 482, "test loss, % of dense's", log_x=True, log_y=False, x_ticks=ticks, mark=100),
    ]
    head = "By steps x density, beside dense training of equal length"
    return framed("Accuracy and test loss against steps times density", head, panels, names)


def ratio(its: Sequence[Pair], figure: str) -> float:
    """The mean figure over dense training's."""
    return statistics.mean(run[figure] / dense[figure] for run, dense in its)


def curve(x: np.ndarray, y: Sequence[float]) -> Curve:
    """Points without errors."""
    return Curve(x, np.array(y, dtype=np.float64), np.zeros(len(x)))
