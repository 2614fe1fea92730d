"""docs/accuracy.md: from the result files of trainings, as far as they exist."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.accuracy.contenders import CONTENDERS, MODELS, POINTS, REDUCTIONS, SKEW, STEPS, STRATEGIES
from benchmarks.accuracy.densities import EXPERIMENTS
from benchmarks.accuracy.standings import Standing, standings
from benchmarks.common.tables import EARLIER
from laconic.tools.tasks import find

HEADS = ("method", "seeds", "test accuracy, %", "lost", "bound", "test loss", "sent, kB", "times smaller")
SPARSE = 0.001  # share of zero weights from which they are worth a column
WHY = """\
Why density 0.001 falls short: these are small models. A thousandth of them is a few hundred entries per
worker and step, so an entry waits for hundreds of steps, a large part of such a short training.
The curves in the JSON files show the gap closing in the second half of the CIFAR-10 training."""

REASONS = """\
Why methods fall short at 1,000 steps, as far as we know:

- Codecs of one to two bits without feedback (`terngrad`, `qsgd` with one level): each worker's noise is about
  as large as its gradient (measured in docs/methods.md), the mean of four workers leaves a quarter of it, and
  TernGrad also clips large gradients.
- Sparse methods with error feedback (`stc`, `dhqc`, `sketchml`, `dgc`; below `deft`, `oktopk`, `lgc`): at
  density d an entry waits for about 1 / d steps, a tenth to a half of this training. DGC's gap
  shrinks over 2,000 steps.
- `majority_vote`: every entry moves by the learning rate, however small its gradient. It needs its own rate,
  but here, as for all methods, it has that of its family.
- `ef21_sgdm` sends changes of an average over ten steps, and all ranks use the mean of these averages: it
  contains old gradients for unsent entries, which error feedback leaves out. Its papers use no momentum.
- `comp_ams` and the AdaGrads: the second moment is that of the sent values. With block signs it is equal for
  all entries of a tensor, so the step is not adapted to each entry; with sparse entries it is learned only
  at the rate at which they are sent. Learning rates are those of the family."""

APART = """\
Why strategies fall short at 1,000 steps, as far as we know:

- Gossip (`sgp`, `dpsgd`, `osgp`, `adpsgd`): each worker computes gradients at its own parameters, with its
  own momentum. They differ by the local updates that have not reached all workers yet. If all average
  exactly at every step, as with `sgp(topology=complete())`, it equals all-reduce. SlowMo's occasional
  exact average costs few bytes. Staleness (`osgp`, `adpsgd`) and fewer bits (`choco`, `lpdt`) increase the
  differences.
- Strategies with local steps synchronise every 8 (`local_sgd`), 12 (`slowmo`) and 50 steps (`diloco`): 20
  to 125 times in 1,000 steps. `easgd` synchronises every 4 and `lsgd` every 16 steps, but they move workers
  only part of the way. On skewed shards, `lsgd` follows the worker with the easiest examples.
- Learning rates are those of the family; no strategy has its own. An outer step with momentum moves the model
  by up to lr / (1 - momentum) times the workers' mean update: 7 for `diloco` with a momentum of 0.9, so with
  SGD its [own rate](own_rates.md) is lower than dense training's. Its default is 0.5."""


def page() -> str:
    """The whole page."""
    lines = [
        "# Accuracy at equal steps",
        "",
        "Mean ± standard error over seeds. `make docs` writes this page from the",
        "results of `python -m benchmarks.accuracy`.",
        "",
        EARLIER,
    ]
    for task, model in MODELS.items():
        if found := standings(task, CONTENDERS):
            lines += ["", heading("Every method", task, model), "", *methods(task, found)]
    lines += ["", REASONS]
    for task, model in MODELS.items():
        if beside_dense(found := standings(task, REDUCTIONS)):
            lines += ["", heading("Reductions that scale", task, model), "", *reductions(task, found)]
    for skew in (None, SKEW):
        of_skew = [contender for contender in STRATEGIES if contender.skew == skew]
        for task, model in MODELS.items():
            if beside_dense(found := standings(task, of_skew)):
                what = "Strategies" if skew is None else "Strategies on skewed shards"
                lines += ["", heading(what, task, model), "", *strategies(task, found)]
    lines += ["", APART]
    for experiment in EXPERIMENTS:
        if (row := experiment.read()) is not None:
            lines += ["", *densities(row)]
    return "\n".join([*lines, "", WHY]) + "\n"


def beside_dense(found: list[Standing]) -> bool:
    """Whether a set has results besides the dense trainings, which sets share."""
    return any(each.contender.spec != each.contender.against for each in found)


def heading(what: str, task: str, model: str) -> str:
    """The heading of one set on one task."""
    return f"## {what}: {find(task).title}: `{model}`, {STEPS:,} steps"


def methods(task: str, found: list[Standing]) -> list[str]:
    """All methods, and their picture."""
    lines = [
        f"{found[0].contender.workers} workers. Sent: bytes that a worker puts on the wire per step, every",
        "copy and header, mean over the second half; smaller: than a dense all-reduce of the same group.",
        f"Methods without error feedback should stay within {POINTS:g} point of dense, plus one standard",
        "error; the others have no bound. Lost: points of accuracy below dense training with the same",
        "optimiser, at one rate for all: the rates of Adam and AMSGrad were not searched, and their dense",
        "trainings are below their [best](own_rates.md).",
        "",
        f"![accuracy over bytes](accuracy-methods-{task}.svg)",
    ]
    return lines + tables(task, found)


def reductions(task: str, found: list[Standing]) -> list[str]:
    """Methods whose traffic does not grow with the number of workers."""
    lines = [
        f"{found[0].contender.workers} workers; bytes per worker and step, as above. CGX should train as",
        "well as dense, within one standard error; the others have no bound.",
    ]
    return lines + tables(task, found)


def strategies(task: str, found: list[Standing]) -> list[str]:
    """Strategies: ranks exchange parameters, and their average is tested."""
    first = found[0].contender
    lines = [
        f"{first.workers} workers; the average of their models is tested. Lost: points of accuracy below",
        "all-reduce of gradients, at equal steps.",
    ]
    if first.skew is None:
        lines += [
            "SGP, alone and under SlowMo, should stay within 1 point of it, plus one standard error; the",
            "others have no bound.",
        ]
    else:
        lines += [
            f"Each worker has its own examples, with Dirichlet({first.skew:g}) shares of each label, or of",
            "each tenth of a text.",
        ]
    return lines + tables(task, found)


def tables(task: str, found: list[Standing]) -> list[str]:
    """One table per family of optimisers, with its dense training first."""
    lines: list[str] = []
    for name, group in groupby(found, key=lambda standing: standing.contender.family):
        members = list(group)
        sparse = any(member.zeros > SPARSE for member in members)
        heads = (*HEADS, "zero weights, %") if sparse else HEADS
        rate = members[0].contender.rates.get(task) or find(task).recipe(MODELS[task]).lr
        lines += [
            "",
            f"**{name}**, peak rate {rate:g} for all",
            "",
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(heads)}",
        ]
        for member in members:
            zeros = (f"{100 * member.zeros:.1f}",) if sparse else ()
            lines.append(f"| {' | '.join((*cells(member), *zeros))} |")
    return lines


def cells(standing: Standing) -> tuple[str, ...]:
    """The figures of one method, in the order of HEADS."""
    dense = standing.contender.spec == standing.contender.against
    seeds = f"{standing.seeds}" + (f" ({standing.diverged} diverged)" if standing.diverged else "")
    return (
        f"`{standing.contender.spec}`",
        seeds,
        standing.accuracy.text(100),
        "" if dense else standing.lost.text(),
        standing.verdict,
        standing.test_loss.text(digits=3),
        f"{1000 * standing.wire_mb:,.1f}",
        f"{standing.smaller:.3g}",
    )


def densities(found: dict[str, Any]) -> list[str]:
    """One experiment that compares DGC with dense."""
    config, name = found["config"], found["experiment"]["name"]
    lines = [
        f"## DGC's densities: {config['title']}: `{config['model']}`, {config['steps']:,} steps",
        "",
        f"{config['workers']} workers, {config['seeds']} seeds, peak rate {config['lr']:g} for all, which",
        "was not searched: at other rates and lengths dense training is ahead ([own rates](own_rates.md)).",
        "Sent: bytes that a worker puts on the wire per step, after the warm-up. The picture counts each",
        "message once, even if several ranks receive it.",
        "",
        f"![training loss by bytes and by step](accuracy-{name}.svg)",
        "",
        "| method | test accuracy, % | test loss | sent, MB | times smaller |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        accuracy, loss = row["accuracy"], row["test_loss"]
        lines.append(
            f"| `{row['spec']}` | {100 * accuracy['mean']:.2f} ± {100 * accuracy['error']:.2f}"
            f" | {loss['mean']:.4f} ± {loss['error']:.4f}"
            f" | {row['wire_mb']:.4f} | {row['smaller']:.0f} |"
        )
    lines += ["", "| method | points lost | bound | loss increase, % | bound |", "|---|---|---|---|---|"]
    for gap in found["gaps"]:
        verdict = ["outside", "within"]
        lines.append(
            f"| `{gap['spec']}` | {gap['points_lost']:.2f} ± {gap['standard_error_points']:.2f}"
            f" | {gap['bound_points']} ({verdict[gap['within_points']]})"
            f" | {gap['loss_more_percent']:.2f} ± {gap['standard_error_percent']:.2f}"
            f" | {gap['bound_percent']:g} ({verdict[gap['within_loss']]}) |"
        )
    return lines
