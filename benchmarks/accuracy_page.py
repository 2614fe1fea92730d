"""docs/accuracy.md: from the files that trainings have left, whatever files are there."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from benchmarks.contenders import CONTENDERS, MODELS, POINTS, REDUCTIONS, SKEW, STEPS, STRATEGIES
from benchmarks.densities import EXPERIMENTS
from benchmarks.standings import Standing, standings
from laconic.tasks import find

HEADS = ("method", "seeds", "test accuracy, %", "lost", "bound", "test loss", "payload, kB", "times smaller")
SPARSE = 0.001  # share of zero weights from which they are worth a column
WHY = """\
Where 0.001 falls short: these are small models. A thousandth of them is a few hundred entries a
worker and step, so that an entry waits for hundreds of steps: much of a training this short.
The curves in the JSON files show the gap closing in the second half of the CIFAR-10 training."""

REASONS = """\
Where methods fall short at 1,000 steps, as far as is known:

- Codes of one to two bits without feedback (`terngrad`, `qsgd` with one level): the noise of each worker is
  of the size of its gradient (docs/methods.md has it measured), the mean of four workers leaves a quarter of
  that, and TernGrad's clipping makes large gradients smaller besides.
- Sparse methods with error feedback (`stc`, `dhqc`, `fastsgd`, `sketchml`, `dgc`; below `deft`, `oktopk`,
  `lgc`): at density d an entry waits for about 1 / d steps, a tenth to a half of this training. DGC's curves
  over 2,000 steps close in.
- `majority_vote`: every entry moves by the rate, however small its gradient. It wants a rate of its own, and
  has that of its family here, as all others do.
- `comp_ams` and the AdaGrads: the second moment is that of what was sent. Of block signs it is the same for
  all entries of a tensor, so the step is no longer adapted to each; of sparse entries it is learned as
  slowly as these are sent. Rates are the family's."""

APART = """\
Where strategies fall short at 1,000 steps, as far as is known:

- Gossip (`sgp`, `dpsgd`, `osgp`, `adpsgd`): each worker takes its gradient where it stands, and workers stand
  apart by what each went alone, with a momentum of its own, since news of it has reached all. Where all
  average exactly at every step, `sgp(topology=complete())`, it is all-reduce. SlowMo's exact average now and
  then costs few bytes. Staleness (`osgp`, `adpsgd`) and fewer bits (`choco`, `lpdt`) add to it.
- Local steps meet every 8 (`local_sgd`), 12 (`slowmo`) and 50 steps (`diloco`): of 1,000 that is 20 to 125
  times. `lsgd` and `easgd` meet every 4, and pull workers together by a part of the way only. Where shards
  are skewed, `lsgd` follows whoever has the easiest examples.
- Rates are the family's; no strategy has one of its own."""


def page() -> str:
    """The whole page."""
    lines = [
        "# Accuracy at equal steps",
        "",
        "Mean ± standard error over seeds. Made by `make docs` from the",
    ]
    lines += ["files that `python -m benchmarks.accuracy` leaves in `benchmarks/results/`."]
    for task, model in MODELS.items():
        if found := standings(task, CONTENDERS):
            lines += ["", heading("Every method", task, model), "", *methods(task, found)]
    lines += ["", REASONS]
    for task, model in MODELS.items():
        if beside_dense(found := standings(task, REDUCTIONS)):
            lines += ["", heading("Reductions that scale", task, model), "", *reductions(found)]
    for skew in (None, SKEW):
        of_skew = [contender for contender in STRATEGIES if contender.skew == skew]
        for task, model in MODELS.items():
            if beside_dense(found := standings(task, of_skew)):
                what = "Strategies" if skew is None else "Strategies on skewed shards"
                lines += ["", heading(what, task, model), "", *strategies(found)]
    lines += ["", APART]
    for experiment in EXPERIMENTS:
        if experiment.file.exists():
            lines += ["", *densities(json.loads(experiment.file.read_text()))]
    return "\n".join([*lines, "", WHY]) + "\n"


def beside_dense(found: list[Standing]) -> bool:
    """Whether more is there than the dense trainings, which sets share."""
    return any(each.contender.spec != each.contender.against for each in found)


def heading(what: str, task: str, model: str) -> str:
    """Of one set on one task."""
    return f"## {what}: {find(task).title}: `{model}`, {STEPS:,} steps"


def methods(task: str, found: list[Standing]) -> list[str]:
    """All methods, and their picture."""
    lines = [
        f"{found[0].contender.workers} workers; payload a worker and step, mean over the second half.",
        f"Methods without error feedback should stay within {POINTS:g} point of dense, plus one standard",
        "error; the others are shown as they are. Lost: points of accuracy less than the dense training of",
        "the same optimiser.",
        "",
        f"![accuracy over bytes](accuracy-methods-{task}.svg)",
    ]
    return lines + tables(found)


def reductions(found: list[Standing]) -> list[str]:
    """Those whose traffic does not grow with the number of workers."""
    lines = [
        f"{found[0].contender.workers} workers; payload a worker and step, as above. CGX should train as",
        "dense does, within one standard error; the others are shown as they are.",
    ]
    return lines + tables(found)


def strategies(found: list[Standing]) -> list[str]:
    """Those whose ranks exchange parameters; what is tested is their average."""
    first = found[0].contender
    lines = [
        f"{first.workers} workers; what is tested is the average of their models. Lost: points of accuracy",
        "less than all-reduce on mean gradients, at equal steps.",
    ]
    if first.skew is None:
        lines += [
            "SGP, alone and under SlowMo, should stay within 1 point of it, plus one standard error; the",
            "others are as they are.",
        ]
    else:
        lines += [
            f"Each worker has examples of its own, with Dirichlet({first.skew:g}) shares of each label; of a",
            "text, of each tenth.",
        ]
    return lines + tables(found)


def tables(found: list[Standing]) -> list[str]:
    """One table a family of optimisers, its dense training first."""
    lines: list[str] = []
    for name, group in groupby(found, key=lambda standing: standing.contender.family):
        members = list(group)
        sparse = any(member.zeros > SPARSE for member in members)
        heads = (*HEADS, "zero weights, %") if sparse else HEADS
        lines += ["", f"**{name}**", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for member in members:
            zeros = (f"{100 * member.zeros:.1f}",) if sparse else ()
            lines.append(f"| {' | '.join((*cells(member), *zeros))} |")
    return lines


def cells(standing: Standing) -> tuple[str, ...]:
    """The figures of one method, as HEADS calls them."""
    dense = standing.contender.spec == standing.contender.against
    seeds = f"{standing.seeds}" + (f" ({standing.diverged} diverged)" if standing.diverged else "")
    return (
        f"`{standing.contender.spec}`",
        seeds,
        standing.accuracy.text(100),
        "" if dense else standing.lost.text(),
        standing.verdict,
        standing.test_loss.text(digits=3),
        f"{1000 * standing.payload_mb:,.1f}",
        f"{standing.smaller:.3g}",
    )


def densities(found: dict[str, Any]) -> list[str]:
    """One experiment of DGC against dense."""
    config, name = found["config"], found["experiment"]["name"]
    lines = [
        f"## DGC's densities: {config['title']}: `{config['model']}`, {config['steps']:,} steps",
        "",
        f"{config['workers']} workers, {config['seeds']} seeds; payload a worker and step after the warm-up.",
        "",
        f"![training loss by bytes and by step](accuracy-{name}.svg)",
        "",
        "| method | test accuracy, % | test loss | payload, MB | times smaller |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        accuracy, loss = row["accuracy"], row["test_loss"]
        lines.append(
            f"| `{row['spec']}` | {100 * accuracy['mean']:.2f} ± {100 * accuracy['error']:.2f}"
            f" | {loss['mean']:.4f} ± {loss['error']:.4f}"
            f" | {row['payload_mb']:.4f} | {row['smaller']:.0f} |"
        )
    lines += ["", "| method | points lost | bound | loss more, % | bound |", "|---|---|---|---|---|"]
    for gap in found["gaps"]:
        verdict = ["outside", "within"]
        lines.append(
            f"| `{gap['spec']}` | {gap['points_lost']:.2f} ± {gap['standard_error_points']:.2f}"
            f" | {gap['bound_points']} ({verdict[gap['within_points']]})"
            f" | {gap['loss_more_percent']:.2f} ± {gap['standard_error_percent']:.2f}"
            f" | {gap['bound_percent']:g} ({verdict[gap['within_loss']]}) |"
        )
    return lines
