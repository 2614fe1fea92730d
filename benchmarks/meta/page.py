"""docs/meta_learning.md and its picture: from benchmarks/meta/results.jsonl."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.common.tables import table
from benchmarks.meta.__main__ import AGENTS, IMPLICIT, METHODS, ROUNDS, RUNS
from benchmarks.meta_reasons import page as reasons
from laconic.tools.report.curves import Curve
from laconic.tools.report.legend import WIDTH
from laconic.tools.report.picture import HEIGHT, legend, panel, style

Rows = list[dict[str, Any]]
LONGER = (
    "Reptile, long",
    "MAML, long",
    "MAML, new agents every round",
    "joint training, new agents every round",
)
DRAWN = ("mean of local models", "P-SGA", "FedAvg", "Reptile", "MAML", "MAML, long")
ABOUT = f"""Each of {AGENTS} agents has one task. Together they search for an initial model from which a new
task is learned in few steps. `laconic.federated.meta` has P-SGA (local models first, then projected gradient
ascent from them until the agents agree), MAML of both orders, iMAML (implicit gradients), Reptile and the
mean of local models, each with any codec up and down.

```python
from laconic.federated.meta import PSGA, Energy, Learner, Mlp, Sinusoids, few_step

learner, agents = Learner(Mlp((1, 40, 40, 1))), Sinusoids(count={AGENTS})
plan = PSGA(rounds={ROUNDS}, up="qsgd(levels=7)", down="qsgd(levels=7)")
found = plan.train(learner, agents, learner.network.first())
print(few_step(learner, Sinusoids(count=600, seed=1), found.weights, shots=10))
print(found.up_nbytes, found.down_nbytes, Energy().joules(found))
```

P-SGA here is **our reconstruction** from the abstract of arXiv:2105.14772: the paper's constraint set, step
sizes and rounds were not available. The results below say nothing about the paper's own results.

`make docs` writes this page from the results of `python -m benchmarks.meta`: mean ± standard error over
seeds. MB are those of all agents' messages in all rounds, up and down, as encoded. J is a model of energy:
1e-10 J a cycle, one flop a cycle (kappa f^2, kappa = 1e-28, f = 1 GHz; recalled), and 2e-7 J a bit both ways
(0.2 W at 1 Mbit/s). These prices are assumptions; the flops of matrix products and the bits are counted.
`Energy(...)` takes other prices.
"""
SINES = """y = A sin(x - p), A in [0.1, 5], p in [0, pi], a network 1-40-40-1. Mean squared error on 600 new
tasks after steps of gradient descent (rate 0.01) on 10 points each.
"""
IMAML = f"""iMAML descends {IMPLICIT.inner_steps} steps on an agent's examples and uses
{IMPLICIT.cg_steps} products with a Hessian, with lambda = {IMPLICIT.proximal:g}; MAML has one step unless
a row says otherwise. iMAML's outer rate was searched with the first seed: 0.01 of 0.003, 0.01 and 0.03 here,
0.001 of 0.001, 0.003 and 0.01 on digits. We tried further settings of iMAML with the first seed, on the
same new tasks, and none of the others, so this comparison favours iMAML.
"""
SWEEP = f"""Unless a row says otherwise, K = {ROUNDS}, r = 1 (of the farthest agent's distance) falling by
power 1, eta = 0.01, a gradient's norm is clipped at 1, and local models take 1,000 steps. "Diverged": a loss
above 1,000 or none.
"""
CLASSES = """scikit-learn's digits; each digit at each of four rotations is a separate class. Agents have
classes of the digits 0 to 6, new tasks those of 7, 8 and 9. A network 64-64-64-5. Accuracy in percent on 200
new tasks after steps of gradient descent (rate 0.1) on 5 images of each class.
"""


def page() -> str:
    """The whole page."""
    return written(kept(), reasons.kept())


def kept() -> dict[str, Rows]:
    """What has been measured, by task."""
    return {task: RUNS.rows(task) for task in METHODS}


def written(found: dict[str, Rows], why: Rows) -> str:
    """The page of these measurements."""
    lines = ["# Meta-learning among agents", "", ABOUT]
    if found.get("sinusoids"):
        lines += sinusoids(found["sinusoids"], why)
    if found.get("digits"):
        lines += digits(found["digits"])
    return "\n".join(lines).rstrip() + "\n"


def sinusoids(rows: Rows, why: Rows) -> list[str]:
    """The section of the regression."""
    variants = {name for name in METHODS["sinusoids"] if "=" in name}
    short = [name for name in METHODS["sinusoids"] if name not in variants and name not in LONGER]
    heads = columns(rows)
    return [
        "## Sinusoids",
        "",
        SINES,
        "![loss after steps on a new task](meta_learning.svg)",
        "",
        *verdict(rows),
        "",
        f"### With {ROUNDS} rounds",
        "",
        "The mean of local models takes one round. P-SGA's energy holds that of the local models.",
        "",
        *table(heads, cells(rows, short, "loss")),
        "",
        IMAML,
        "### With more rounds",
        "",
        *table(heads, cells(rows, [*LONGER], "loss")),
        "",
        "### P-SGA's settings",
        "",
        SWEEP,
        *table(heads, cells(rows, ["mean of local models", "P-SGA", *sorted(variants)], "loss")),
        "",
        *reasons.section(why),
    ]


def digits(rows: Rows) -> list[str]:
    """The section of the classes."""
    heads = columns(rows)
    return [
        "## Rotated digits, 5-way 5-shot",
        "",
        CLASSES,
        *table(heads, cells(rows, [*METHODS["digits"]], "accuracy")),
        "",
    ]


def columns(rows: Rows) -> tuple[str, ...]:
    """The heads of a table of methods."""
    after = (f"after {step}" for step in rows[0]["steps"])
    return ("method", "seeds", "rounds", *after, "MB", "J", "of it sending")


def cells(rows: Rows, names: list[str], what: str) -> list[tuple[str, ...]]:
    """One row of a table for each method that has been measured."""
    made = []
    for name in names:
        runs = of(rows, name)
        if runs:
            scale = 100.0 if what == "accuracy" else 1.0
            figures = [figure([run[what][i] for run in runs], scale) for i in range(len(runs[0]["steps"]))]
            megabytes = mean(run["up"] + run["down"] for run in runs) / 1e6
            sending = mean(run["joules_sending"] for run in runs)
            joules = sending + mean(run["joules_computing"] for run in runs)
            made.append(
                (
                    name,
                    str(len(runs)),
                    f"{runs[0]['rounds']:,}",
                    *figures,
                    f"{megabytes:,.1f}",
                    f"{joules:,.1f}",
                    f"{100 * sending / joules:.0f} %",
                )
            )
    return made


def figure(values: list[float | None], scale: float = 1.0) -> str:
    """`mean ± standard error`; a run whose loss is not finite or above 1,000 has diverged.

    >>> figure([1.0, 2.0, 3.0]), figure([2.0, None]), figure([0.5], 100)
    ('2.00 ± 0.58', 'diverged', '50.0')
    """
    finite = [scale * value for value in values if value is not None and abs(value) < 1000]
    if len(finite) < len(values):
        return "diverged"
    places = 1 if scale > 1 else 2
    error = f" ± {stdev(finite) / math.sqrt(len(finite)):.{places}f}" if len(finite) > 1 else ""
    return f"{mean(finite):.{places}f}{error}"


def verdict(rows: Rows) -> list[str]:
    """What came out of P-SGA, in words, whichever way."""
    last = {name: at_end(of(rows, name)) for name in METHODS["sinusoids"]}
    known = {name: loss for name, loss in last.items() if loss is not None}
    climbs = {name: loss for name, loss in known.items() if name.startswith("P-SGA")}
    if not climbs:
        return []
    best = min(climbs, key=lambda name: climbs[name])
    said = [f"The best of {len(climbs)} variants of P-SGA is {best}: {climbs[best]:.2f} after 10 steps."]
    for name in ("mean of local models", "FedAvg", "Reptile", "MAML", "iMAML"):
        if name in known:
            word = "better" if climbs[best] < known[name] else "**worse**"
            wins, seeds = better_in(of(rows, best), of(rows, name))
            said.append(f"- {word} than {name} ({known[name]:.2f}); better in {wins} of {seeds} seeds")
    return [said[0], "", *said[1:]]


def better_in(runs: Rows, others: Rows) -> tuple[int, int]:
    """In how many of the seeds that both have the first have the lower loss at the end."""
    by_seed = {run["seed"]: run["loss"][-1] for run in others}
    pairs = [(run["loss"][-1], by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    return sum(loss < other for loss, other in pairs), len(pairs)


def at_end(runs: Rows) -> float | None:
    """The mean loss after the last step; None where it is not known or not finite."""
    values = [run["loss"][-1] for run in runs]
    return mean(values) if values and all(value is not None for value in values) else None


def of(rows: Rows, name: str) -> Rows:
    """The runs of one method."""
    return [row for row in rows if row["name"] == name]


def picture() -> str:
    """The SVG document: loss by steps on a new task, on sinusoids and on digits."""
    found = kept()
    drawn = {task: [losses(of(found[task], name)) for name in DRAWN] for task in found}
    title = "Loss on new tasks, by steps of gradient descent from the meta-model"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(title)}</text>',
        panel(drawn["sinusoids"], 56, "sinusoids: mean squared error", log_x=False),
        panel(drawn["digits"], 482, "rotated digits: cross-entropy", log_x=False),
        legend(list(DRAWN)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def losses(runs: Rows) -> Curve:
    """Mean loss over seeds by steps; empty where nothing was measured."""
    if not runs:
        return curve([], [])
    values = [[np.nan if loss is None else loss for loss in run["loss"]] for run in runs]
    return curve(runs[0]["steps"], np.mean(values, axis=0))


def curve(x: Any, y: Any) -> Curve:
    """A line through these points."""
    return Curve(np.array(x, dtype=float), np.array(y, dtype=float), np.zeros(len(x)))
