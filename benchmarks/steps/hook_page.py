"""The section of docs/steps.md on a hook that does nothing, from benchmarks/steps/hook.json."""

from __future__ import annotations

import statistics
from textwrap import fill
from typing import Any

from benchmarks.common.tables import table
from benchmarks.steps.cells import bar, by_place, links, spelled
from benchmarks.steps.contenders import ALONE, GOALS, NOTHING, WHOLE

WIDTH = 110


def section(found: dict[str, Any]) -> list[str]:
    """Return the lines on our methods next to DDP with a hook that exchanges nothing."""
    rounds, machine = found["rounds"], found["machine"]
    about = (
        "DDP whose hook exchanges nothing, and DDP with methods (`python -m benchmarks.steps --hook`), on"
        f" {machine['cores']} cores of {machine['processor']}, median of {rounds}"
        f" round{'s' if rounds > 1 else ''}. *Share*: seconds of the hook that does nothing, divided by the"
        " method's; for goals, the better of both bucket sizes counts. *Added*: to its step, and to the"
        " processor time of a rank."
    )
    lines, goals = [fill(about, WIDTH)], []
    for workload in found["workloads"]:
        rows, hosts = by_place(workload), f"{workload['hosts']} hosts"
        lines += ["", f"### {hosts}, {workload['about']}", ""]
        cells = []
        for (link, name), row in rows.items():
            if name not in (ALONE, NOTHING):
                nothing = rows[link, NOTHING]
                added_s = [row[key] - nothing[key] for key in ("step_s", "processor_s")]
                parts = (f"{1e3 * row[key]:.0f}" for key in ("encode_s", "communicate_s", "decode_s"))
                share, more = f"{share_of(row, nothing):.3f}", (f"{1e3 * each:.0f}" for each in added_s)
                cells.append((link, spelled(name), f"{row['step_s']:.3f}", share, *more, *parts))
        seconds = ", ".join(f"{rows[link, NOTHING]['step_s']:.3f} s ({link})" for link in links(workload))
        heads = ("added, ms", "processor, ms", "encode, ms", "communicate, ms", "decode, ms")
        lines += table(("link", "method", "s", "share", *heads), cells)
        floor = 1e3 * workload["copy_s"]
        memory = (
            f"The hook that does nothing: {seconds}. A copy of all gradients takes {floor:.1f} ms if all"
            " ranks copy at once. `dgc` reads gradient, velocity and residual, writes the new ones and the"
            " old velocity, reads the residual again, writes the mean, and clears SGD's buffers: the traffic"
            f" of 4.5 copies, or about {4.5 * floor:.0f} ms."
        )
        lines += ["", fill(memory, WIDTH)]
        if workload["name"] == "gpt":
            for method, least in GOALS.items():
                for link in links(workload):
                    names = (method, method + WHOLE)
                    share = max(share_of(rows[link, name], rows[link, NOTHING]) for name in names)
                    what = f"{hosts}, {link}: share of `{method}` at least {least:g}"
                    goals.append(bar(what, share, least, digits=3))
    return [*lines, "", *table(("goal", "measured", "met"), goals)]


def share_of(row: dict[str, Any], nothing: dict[str, Any]) -> float:
    """Return seconds of a step without an exchange over those of this one, median of the rounds."""
    return statistics.median(
        idle / step for idle, step in zip(nothing["steps_s"], row["steps_s"], strict=True)
    )
