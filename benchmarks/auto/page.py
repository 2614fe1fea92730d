"""docs/auto.md: from benchmarks/auto/results.json, if it exists."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.auto.__main__ import AUTO, bars, named
from benchmarks.common.results import read
from benchmarks.common.tables import table
from benchmarks.own_rates.families import LOCAL_MOMENTUM
from benchmarks.steps.contenders import DENSE
from laconic.methods.auto import auto

H200 = json.loads((Path(__file__).parents[1] / "gpu/results/before.json").read_text())["training"]["accuracy"]
SPARSE = (
    "The fifth candidate is that of `stc(density=0.01)`. ResNet-9 on CIFAR-10, 4 workers, 18 epochs, one"
    " seed, all at the learning rate of dense training, on an H200, by an independent implementation of the"
    " update rules (see [GPUs](gpu.md)), not by this library:",
    "",
    *table(
        ("method, momentum before the exchange", "accuracy, %", "lost"),
        [
            (f"`{spec}`", f"{H200[name]:.2f}", "" if name == "dense" else f"{H200['dense'] - H200[name]:.2f}")
            for spec, name in (
                ("dense()", "dense"),
                ("sketchml()", "sketchml, momentum before"),
                ("stc(density=0.01)", "stc, momentum before"),
                ("topk(density=0.01)", "topk, momentum before"),
                ("dgc(density=0.01)", "dgc"),
                ("oktopk(density=0.01)", "oktopk, momentum before"),
            )
        ],
    ),
    "",
    "A sparse method needs a training of many times 1 / density steps to come close to dense training: see"
    f" [own rates](own_rates.md) after {LOCAL_MOMENTUM.steps:,} steps. For short trainings,"
    " `auto(lossiest=scatter_reduce(minmax(block=128)))` stops at 4 bits.",
    "",
)


def page() -> str:
    """The whole page."""
    return written(read("auto"))


def written(found: dict[str, Any]) -> str:
    """The page of these measurements."""
    rounds = found["rounds"]
    explained, momentum, *_ = inspect.cleandoc(auto.__doc__ or "").split("\n\n")
    lines = [
        "# auto() compared with its candidates",
        "",
        *earlier(found),
        explained,
        "",
        momentum,
        "",
        "With SGD and momentum `auto()` stops at the fifth candidate, else at the fourth.",
        "",
        *SPARSE,
        "`make docs` writes this page from the results of `python -m benchmarks.auto`,",
        f"on a [lab](lab.md) of two hosts on {found['machine']['cores']} cores.",
        "",
        *table(
            ("goal", "measured", "met"),
            [(bar.aim, bar.found, "yes" if bar.kept else "no") for bar in bars(found)],
        ),
        "",
        "## A step",
        "",
        "The GPT of 10.8 million parameters of [steps over slow links](steps.md), with SGD and momentum."
        " Milliseconds a step,"
        f" median of {rounds} round{'s' if rounds > 1 else ''}. Unshaped, messages only pass through memory:"
        " there compression seldom pays.",
        "",
        *table(
            ("candidate", *(named(row["link"]) for row in found["steps"])),
            [
                (
                    spec if spec == DENSE else f"`{spec}`",
                    *(f"{1e3 * median(row['seconds'][spec]):,.0f}" for row in found["steps"]),
                )
                for spec in found["steps"][0]["seconds"]
            ],
        ),
        "",
        "The logged decision of each round:",
        "",
        *(f"- {named(row['link'])}: {each}" for row in found["steps"] for each in row["said"]),
        "",
        *dropped(found["drop"]),
    ]
    if "loss" in found:
        lines += ["", *ends(found["loss"], found["seeds"])]
    if "alike" in found:
        lines += ["", *repeated(found["alike"])]
    return "\n".join(lines) + "\n"


def earlier(found: dict[str, Any]) -> list[str]:
    """What to know of figures that were measured before the default changed."""
    specs = {row["spec"] for each in found.get("loss", ()) for row in each["rows"]}
    if not (before := sorted(spec for spec in specs if spec.startswith("auto(") and spec != AUTO)):
        return []
    return [
        f"Final losses and repeated runs below are older: of `{before[0]}`, whose search had one pass, with"
        " momentum in the optimiser.",
        "",
    ]


def dropped(drop: dict[str, Any]) -> list[str]:
    """The section of a link that drops."""
    return [
        "## A link that drops",
        "",
        f"From {drop['before']} to {drop['after']} in mid-run, where the best candidate's step takes"
        f" {1e3 * drop['best_s']:,.0f} ms:",
        "",
        *(f"- {each}" for each in drop["said"]),
    ]


def ends(losses: list[dict[str, Any]], seeds: int) -> list[str]:
    """The section of losses."""
    rows = [(each["link"], row) for each in losses for row in each["rows"]]
    return [
        "## Final loss",
        "",
        f"A small GPT on Shakespeare's plays, by SGD with Nesterov momentum, {losses[0]['steps']} steps,"
        f" two workers: test loss after the last step, mean ± standard error of {seeds} seeds, compared"
        " with the candidate that was fastest on that link.",
        "",
        *table(
            ("link", "method", "test loss", "ms a step"),
            [
                (
                    named(link),
                    f"`{row['spec']}`",
                    f"{row['test_loss']['mean']:.4f} ± {row['test_loss']['error']:.4f}",
                    f"{1e3 * row['step_s']['mean']:.0f}",
                )
                for link, row in rows
            ],
        ),
    ]


def repeated(runs: list[dict[str, Any]]) -> list[str]:
    """The section of runs that differ in their clocks alone."""
    return [
        "## The same run again",
        "",
        f"The choice of auto() depends on measured times. The same GPT, {runs[0]['steps']} steps with one"
        " seed: test loss of each run, and how many times fewer bytes than dense it sent; measured alone, on"
        f" {runs[0]['machine']['cores']} cores ({runs[0]['machine']['processor']}).",
        "",
        *table(
            ("link", "dense", *(f"auto(), run {i + 1}" for i in range(len(runs[0]["auto"])))),
            [
                (
                    named(row["link"]),
                    f"{row['dense']:.4f}",
                    *(
                        f"{loss:.4f}, {times:.3g} x"
                        for loss, times in zip(row["auto"], row["smaller"], strict=True)
                    ),
                )
                for row in runs
            ],
        ),
    ]
