"""docs/straggler.md: from benchmarks/straggler/results.json, if it exists."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.common.results import read
from benchmarks.common.tables import table
from benchmarks.straggler.__main__ import FEWER, LR, TWICE


def page() -> str:
    """The whole page."""
    return written(read("straggler"))


def written(found: dict[str, Any]) -> str:
    """The page of these measurements."""
    to_loss, dense = found["to_loss"], found["to_loss"][0]
    lines = [
        "# Training without a barrier, over slow links",
        "",
        f"{found['hosts']} hosts of a [lab](lab.md) on {found['machine']['cores']} cores, a model of"
        f" {found['parameters'] / 1e6:.1f} million parameters, SGD with momentum 0.9 at {LR:g}"
        " for all.",
        "`make docs` writes this page from the results of `python -m benchmarks.straggler`.",
        "MB are those of a host's interface, including all headers.",
        "",
        "## One slow host",
        "",
        f"Links of {found['links']['asleep']}. The last host sleeps {1e3 * found['sleep_s']:.0f} ms before"
        f" {100 * found['share']:.0f} % of its steps.",
        f"Seconds for {found['steps']} steps: mean over hosts, and the slowest host; medians of"
        f" {found['repeats']} runs.",
        "",
        *table(
            ("strategy", "awake, s", "asleep, s", "slowest, s", "vs. dense", "MB per host"),
            asleep_cells(found["asleep"]),
        ),
        "",
        *table(("goal", "measured", "met"), asleep_aims(found["asleep"])),
        "",
        "## To the same loss",
        "",
        f"Links of {found['links']['to_loss']}. Dense trains for {dense['steps']} steps, to a held-out loss"
        f" of {dense['losses'][-1]:.4f};",
        "the others train until they reach it.",
        "",
        *table(
            ("strategy", "steps", "loss", "seconds", "MB per host", "fewer than dense"),
            [loss_cells(row, dense) for row in to_loss],
        ),
        "",
        *table(("goal", "measured", "met"), [bytes_aim(to_loss[1:], dense)]),
    ]
    return "\n".join(lines) + "\n"


def asleep_cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row per strategy: with the host awake and asleep."""
    cells, dense_s = [], rows[1]["mean_s"]
    for spec, pair in groupby(rows, key=lambda row: row["spec"]):
        awake, asleep = pair
        times = dense_s / asleep["mean_s"]
        seconds = (f"{each:.1f}" for each in (awake["mean_s"], asleep["mean_s"], asleep["slowest_s"]))
        cells.append((f"`{spec}`", *seconds, f"{times:.1f} times faster", f"{asleep['sent_mb']:,.0f}"))
    return cells


def asleep_aims(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The goals with the host asleep, and whether they are met."""
    seconds = {row["spec"].split("(")[0]: row["mean_s"] for row in rows if row["sleep_s"]}
    overlapped = seconds["dense"] / seconds["osgp"]
    still = seconds["osgp"] / seconds["adpsgd"]
    return [
        aim(f"overlapped gossip at least {TWICE} times faster than dense", overlapped, overlapped >= TWICE),
        aim("AD-PSGD faster than overlapped gossip", still, still > 1),
    ]


def bytes_aim(rows: list[dict[str, Any]], dense: dict[str, Any]) -> tuple[str, ...]:
    """The goal in bytes, for the strategy that needs fewest."""
    fewest = min((row["sent_mb"] for row in rows if row["reached"]), default=dense["sent_mb"])
    fewer = dense["sent_mb"] / fewest
    return aim(f"at least {FEWER} times fewer bytes to dense's loss", fewer, fewer >= FEWER)


def aim(what: str, times: float, kept: bool) -> tuple[str, ...]:
    """A row of the table of goals."""
    return what, f"{times:.2f} times", "yes" if kept else "**no**"


def loss_cells(row: dict[str, Any], dense: dict[str, Any]) -> tuple[str, ...]:
    """What it took to reach the loss, or that it did not."""
    fewer = f"{dense['sent_mb'] / row['sent_mb']:.1f} times" if row["reached"] else "not reached"
    loss, sent = f"{row['losses'][-1]:.4f}", f"{row['sent_mb']:,.0f}"
    return (f"`{row['spec']}`", str(row["steps"]), loss, f"{row['seconds']:.0f}", sent, fewer)
