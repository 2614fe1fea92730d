"""docs/auto.md: from benchmarks/results/auto.json, where that was measured."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from benchmarks.auto import AFTERWARDS, AUTO, RESULTS, WAYS

from docs.tables import table

WITHIN_STEPS = 50  # bar: steps until a link that has dropped is dealt with


def page() -> str:
    """The whole page."""
    return written(json.loads(RESULTS.read_text()))


def written(found: dict[str, Any]) -> str:
    """The page of these measurements."""
    lines = [
        "# auto() beside its rungs",
        "",
        "Made by `make docs` from what `python -m benchmarks.auto` leaves in `benchmarks/results/auto.json`,",
        f"on a [lab](lab.md) of two hosts on {found['machine']['cores']} cores.",
        "",
        "## A step",
        "",
        "The GPT of 10.8 million parameters of [steps over slow links](steps.md). Milliseconds a step,"
        f" medians over {found['rounds']} rounds.",
        "",
        *table(
            ("way", *(told(row["link"]) for row in found["steps"])),
            [
                (f"`{way}`", *(f"{1e3 * median(row['seconds'][way]):,.0f}" for row in found["steps"]))
                for way in (*WAYS, AUTO)
            ],
        ),
        "",
        f"Aimed at: within {found['bar'] - 1:.0%} of the best rung. "
        + "; ".join(f"{told(row['link'])}: {row['ratio'] - 1:+.0%}" for row in found["steps"])
        + ".",
        "",
        "What it said when it had decided, round by round:",
        "",
        *(f"- {told(row['link'])}: {each}" for row in found["steps"] for each in row["said"]),
        "",
        *dropped(found["drop"], found["bar"]),
    ]
    if "loss" in found:
        lines += ["", *ends(found["loss"], found["seeds"])]
    return "\n".join(lines) + "\n"


def told(link: str | None) -> str:
    """A link in words."""
    return link or "unshaped"


def dropped(drop: dict[str, Any], bar: float) -> list[str]:
    """The section of a link that drops."""
    steps, kept = drop["adapted"], drop["adapted"] <= WITHIN_STEPS
    when = (
        f"From step {steps} on steps stay" if steps < AFTERWARDS else "In all steps that followed none stayed"
    )
    return [
        "## A link that drops",
        "",
        f"From {drop['before']} to {drop['after']} in mid-run. {when} within {bar - 1:.0%} of"
        f" {1e3 * drop['best_s']:,.0f} ms, the best rung's there.",
        f"Aimed at: within {WITHIN_STEPS} steps; that is {'kept' if kept else 'missed'}.",
        "",
        *(f"- {each}" for each in drop["said"]),
    ]


def ends(losses: list[dict[str, Any]], seeds: int) -> list[str]:
    """The section of losses."""
    rows = [(each["link"], row) for each in losses for row in each["rows"]]
    return [
        "## Where it ends",
        "",
        f"An LSTM on Shakespeare's plays, {losses[0]['steps']} steps, two workers: test loss after the last"
        f" step, mean ± standard error of {seeds} seeds, beside the rung whose step was fastest there.",
        "",
        *table(
            ("link", "method", "test loss", "ms a step"),
            [
                (
                    told(link),
                    f"`{row['spec']}`",
                    f"{row['test_loss']['mean']:.4f} ± {row['test_loss']['error']:.4f}",
                    f"{1e3 * row['step_s']['mean']:.0f}",
                )
                for link, row in rows
            ],
        ),
    ]
