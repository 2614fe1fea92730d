"""docs/outer.md: bytes to dense data parallelism's loss, with figures of benchmarks/outer/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.tables import table
from benchmarks.outer import inside
from benchmarks.outer.__main__ import (
    BATCH,
    DENSE,
    FEWER,
    HELD,
    OTHERS,
    PATIENCE,
    RATES,
    SEEDS,
    STEPS,
    WORKERS,
    Contender,
    done,
)

__all__ = ["DENSE", "done", "page"]

LINK = 100e6 / 8  # bytes a second
HEAD = f"""# Bytes to the same loss

`make docs` writes this page from the results of `python -m benchmarks.outer`.

{WORKERS} workers train a small GPT on Shakespeare, letter by letter, {BATCH} windows of 64 letters a step.
Dense data parallelism with AdamW does {STEPS} steps; the others train until the mean of their workers has its
test loss of the same seed, or {PATIENCE:g} times as many steps. Each has the best learning rate of
{", ".join(f"{rate:g}" for rate in RATES)}, chosen on the first seed. Dense training's best is the largest of
them, and so is that of most others: higher rates may give lower losses, so the factors hold for this loss
only. MuLoCo, whose optimiser is Muon, is compared with AdamW.

*MB* are the bytes that a worker puts on the wire until then, packet headers included, on any link. *seconds*
is the time to send them at 100 Mbit/s, without compute: with `overlap=` in parallel with compute, otherwise
in bursts between steps.
"""
TOLD = ("contender", "spec", "optimiser", "rate", "seeds", "steps", "MB", "fewer", "seconds at 100 Mbit/s")


def page() -> str:
    """Return the page."""
    return written({each.name: done(each) for each in (DENSE, *OTHERS)})


def written(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the page on these runs, by contender."""
    base = {row["seed"]: row["curve"][-1][2] for row in found[DENSE.name]}
    lines = [HEAD]
    if not base:
        return HEAD
    parameters = next(iter(found[DENSE.name]))["parameters"]
    losses = [row["curve"][-1][1] for row in found[DENSE.name]]
    lines += [
        f"The model has {parameters:,} parameters; dense data parallelism ends at a test loss of"
        f" {statistics.mean(losses):.3f}.",
        "",
    ]
    rows = [cells(each, found[each.name], base) for each in (DENSE, *OTHERS) if found[each.name]]
    lines += table(TOLD, rows)
    lines += ["", *verdicts(found, base), "", *inside.section()]
    return "\n".join(lines)


def reached(row: Mapping[str, Any]) -> bool:
    """Return whether a run has reached dense's loss."""
    return bool(row["target"] == 0 or row["curve"][-1][1] <= row["target"])


def fewer(rows: Sequence[Mapping[str, Any]], base: Mapping[int, float]) -> float:
    """Return dense's megabytes over these, of the same seeds, in all."""
    return sum(base[row["seed"]] for row in rows) / sum(row["curve"][-1][2] for row in rows)


def cells(contender: Contender, rows: Sequence[Mapping[str, Any]], base: Mapping[int, float]) -> list[str]:
    """Return a row of the table: means over seeds; with `>` if a seed did not reach dense's loss."""
    least = "" if all(map(reached, rows)) else "> "
    steps = statistics.mean(row["curve"][-1][0] for row in rows)
    sent = statistics.mean(row["curve"][-1][2] for row in rows)
    times = "-" if contender is DENSE else "not reached" if least else f"{fewer(rows, base):.0f} times"
    optimiser = "Muon, AdamW" if contender.muon else "AdamW"
    figures = [f"{least}{steps:.0f}", f"{least}{sent:.4g}", times, f"{least}{sent * 1e6 / LINK:.3g}"]
    named = [contender.name, f"`{contender.spec}`", optimiser, f"{rows[0]['rate']:g}", str(len(rows))]
    return named + figures


def verdicts(found: Mapping[str, Sequence[Mapping[str, Any]]], base: Mapping[int, float]) -> list[str]:
    """Return lines on the goal of FEWER, for the contenders in HELD."""
    told = []
    for name in HELD:
        rows = found[name]
        if len(rows) < len(SEEDS):
            told.append(f"- `{name}`: {len(rows)} of {len(SEEDS)} seeds are done.")
        elif not all(map(reached, rows)):
            told.append(f"- `{name}` does not reach dense's loss in {PATIENCE:g} times its steps.")
        else:
            verdict = "met" if fewer(rows, base) >= FEWER else "missed"
            told.append(
                f"- `{name}`: {fewer(rows, base):.0f} times fewer bytes to this loss; the goal of {FEWER}"
                f" is {verdict}."
            )
    return told
