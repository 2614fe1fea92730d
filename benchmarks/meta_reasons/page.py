"""The part of docs/meta_learning.md that measures why P-SGA ends where it does."""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks.common.tables import table
from benchmarks.meta_reasons.__main__ import GROUP, RUNS, SIGNS

Found = list[dict[str, Any]]


def kept() -> Found:
    """The seeds that have been measured."""
    return RUNS.rows(GROUP)


def section(found: Found) -> list[str]:
    """Gradients where agents stand, and the same walk with ascent, without a step, and with descent."""
    if not found:
        return []
    of = {name: mean(each[name] for each in found) for name in NUMBERS}
    wins = sum(ended(each, "descent") < ended(each, "ascent") for each in found)
    heads = ("step", *(f"after {step}" for step in found[0]["steps"]), "agents' own loss", "from the mean")
    return [
        "### Why",
        "",
        "Ascent should lead an agent back along its path. Means over agents, batches and"
        f" {len(found)} seeds,",
        "from `python -m benchmarks.meta_reasons`; a gradient's norm is that of a batch of 10:",
        "",
        *table(("at the own models", "measured"), [(NUMBERS[name], f"{of[name]:.3f}") for name in NUMBERS]),
        "",
        "A random direction in this space has a cosine of about 0.02 in size. The same walk from the"
        " same models",
        "without messages, with ascent, with the projection alone (eta = 0) and with descent:",
        "",
        *table(heads, [cells(found, name) for name in SIGNS]),
        "",
        f"Descent ends {'lower' if wins * 2 > len(found) else 'higher'} after the last step in"
        f" {max(wins, len(found) - wins)} of {len(found)} seeds.",
        "",
    ]


NUMBERS = {
    "own_loss": "loss of own models",
    "mean_loss": "loss of their mean, on the agents' tasks",
    "far": "distance to their mean",
    "at_own": "norm of the gradient",
    "at_own_exact": "norm of the gradient, batch of 1,000",
    "at_mean": "norm of the gradient at the mean",
    "common_at_mean": "norm of the agents' mean gradient there",
    "to_mean": "cosine of ascent and the way to the mean",
    "to_first": "cosine of ascent and the way to the first model",
}


def cells(found: Found, name: str) -> tuple[str, ...]:
    """One walk."""
    walks = [each["walks"][name] for each in found]
    losses = (f"{mean(walk['loss'][i] for walk in walks):.2f}" for i in range(len(found[0]["steps"])))
    agents, moved = (mean(walk[what] for walk in walks) for what in ("agents", "moved"))
    return name, *losses, f"{agents:.2f}", f"{moved:.2f}"


def ended(each: dict[str, Any], name: str) -> float:
    """The loss of a walk's end after the last step on a new task."""
    return float(each["walks"][name]["loss"][-1])
