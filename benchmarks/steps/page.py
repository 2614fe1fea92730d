"""docs/steps.md: from benchmarks/steps/results.json, and from the other files there."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common.results import read
from benchmarks.common.tables import table
from benchmarks.predictions.__main__ import GOOD
from benchmarks.predictions.__main__ import RESULTS as PREDICTIONS
from benchmarks.steps import hook_page
from benchmarks.steps.__main__ import AS_FAST, BEHIND, EFFICIENT, FASTER, HOOK, OVERHEAD, SLOW, UNSHAPED
from benchmarks.steps.cells import Rows, bar, by_place, links, spelled
from benchmarks.steps.contenders import ALONE, AUTO, DENSE, DGC, OURS, POWERSGD, WHOLE
from laconic.tools.lab.link import FREE


def page() -> str:
    """The whole page."""
    unshaped, hook, forecasts = (
        json.loads(each.read_text()) if each.exists() else None for each in (UNSHAPED, HOOK, PREDICTIONS)
    )
    return written(read("steps"), forecasts, unshaped, hook)


def written(
    found: dict[str, Any],
    forecasts: dict[str, Any] | None,
    unshaped: dict[str, Any] | None = None,
    hook: dict[str, Any] | None = None,
) -> str:
    """The page of these measurements."""
    rounds = found["rounds"]
    lines = [
        "# A training step over slow links",
        "",
        "`make docs` writes this page from the results of `python -m benchmarks.steps`.",
        f"Hosts of a [lab](lab.md) on {found['machine']['cores']} cores ({found['machine']['processor']}),"
        f" torch {found['machine']['torch']}, one thread per rank.",
        "A step is forward, backward, exchange and `optimizer.step()`, with SGD and momentum 0.9. Seconds are"
        f" the slowest rank's median step, median of {rounds} round{'s' if rounds > 1 else ''}.",
        "",
        "Efficiency: seconds of the same step with no communication, measured next to every contender in",
        "each round, divided by the step's seconds. MB: bytes that a host's interface sends per step,",
        "including headers. Processor: CPU seconds per rank and step. Both on the first link.",
        "",
        "Plain torch is a simple user script: tensor by tensor after backward, one byte per entry. All",
        "contenders on DDP use `gradient_as_bucket_view`. For hivemind, its 8-bit codec is measured in the",
        "pattern of its averager: each rank averages a part of every tensor. All ranks use numpy 1.26, as",
        "hivemind requires.",
    ]
    for workload in found["workloads"]:
        lines += ["", f"## {workload['hosts']} hosts, {workload['about']}", "", *when(workload)]
        lines += results(workload)
    if absent := found.get("absent"):
        lines += ["", *(f"Without {name}: {why}." for name, why in absent.items())]
    lines += [
        "",
        "## Goals",
        "",
        "For DGC, the better of both bucket sizes counts on each link.",
        "",
    ]
    lines += table(("goal", "measured", "met"), all_bars(found))
    lines += ["", "## Where the time of DGC's step goes", "", *split(found)]
    if hook is not None:
        lines += ["", "## Next to a hook that does nothing", "", *hook_page.section(hook)]
    if unshaped is not None:
        lines += ["", "## An unlimited link", "", *unshaped_lines(unshaped)]
    if forecasts is not None:
        lines += ["", "## Forecasts", "", *forecast_lines(forecasts)]
    return "\n".join(lines) + "\n"


def when(workload: dict[str, Any]) -> list[str]:
    """Return a line on machine and rounds, for a workload that was measured before the first one."""
    if not (about := workload.get("earlier")):
        return []
    number, machine = about["rounds"], about["machine"]
    rounds = f"{number} round{'s' if number > 1 else ''}"
    where = f"{machine['processor']}, {machine['kernels'].removeprefix('native-')}"
    return [f"Measured earlier, on {where}, in {rounds}; `auto()` then chose separately for each bucket.", ""]


def short() -> str:
    """Seconds of a step of a few contenders, one row per workload and link."""
    found = read("steps")
    heads = ("", ALONE, DENSE, POWERSGD, f"`{DGC}`", f"`{AUTO}`")
    lines = []
    for workload in found["workloads"]:
        rows = by_place(workload)
        for link in links(workload):
            dgc_s = min(row["step_s"] for row in of_dgc(rows, link))
            before, after = ([rows[link, name]["step_s"] for name in names] for names in (heads[1:4], [AUTO]))
            seconds = (f"{each:.2f}" for each in (*before, dgc_s, *after))
            lines.append((f"{workload['hosts']} hosts, {workload['about'].split(',')[0]}, {link}", *seconds))
    return "\n".join(table(heads, lines))


def results(workload: dict[str, Any]) -> list[str]:
    """One row per contender, its links side by side."""
    rows, over = by_place(workload), links(workload)
    names = dict.fromkeys(row["contender"] for row in workload["rows"])
    heads = [f"{what}, {link}" for link in over for what in ("s", "efficiency", "vs. dense")]
    lines = []
    for name in names:
        cells = []
        for link in over:
            row = rows[link, name]
            faster = rows[link, DENSE]["step_s"] / row["step_s"] if (link, DENSE) in rows else None
            times = "" if faster is None or name in (DENSE, ALONE) else f"{faster:.1f} times"
            cells += [f"{row['step_s']:.3f}", f"{row['efficiency']:.2f}", times]
        costs = rows[over[0], name]
        lines.append((spelled(name), *cells, f"{costs['sent'] / 1e6:.2f}", f"{costs['processor_s']:.3f}"))
    return table(("", *heads, "MB", "processor, s"), lines)


def all_bars(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return a row per goal, with the measurement and whether it is met; DGC with its better bucket size."""
    goals = []
    for workload in found["workloads"]:
        rows, name = by_place(workload), f"{workload['hosts']} hosts"
        best = {link: max(of_dgc(rows, link), key=lambda row: row["efficiency"]) for link in links(workload)}
        for link, row in best.items():
            least = EFFICIENT[workload["name"]]
            goals.append(
                bar(f"{name}, {link}: efficiency of DGC at least {least:g}", row["efficiency"], least)
            )
            if workload["name"] == "gpt" and (link, POWERSGD) in rows:
                share = added(row) / added(rows[link, POWERSGD])
                what = f"{name}, {link}: DGC adds at most {OVERHEAD:g} of what PowerSGD's hook of rank 1 adds"
                goals.append((what, f"{share:.2f}", "yes" if share <= OVERHEAD else "**no**"))
            if (link, AUTO) in rows:
                fixed = [each for each in OURS if each != AUTO and not each.endswith(WHOLE)]
                best_s = min(rows[link, each]["step_s"] for each in fixed if (link, each) in rows)
                times = rows[link, AUTO]["step_s"] / best_s
                what = (
                    f"{name}, {link}: `{AUTO}` at most {BEHIND:g} times the fastest of ours in DDP's buckets"
                )
                goals.append((what, f"{times:.2f}", "yes" if times <= BEHIND else "**no**"))
        if (SLOW, DENSE) in rows:
            times, least = rows[SLOW, DENSE]["step_s"] / best[SLOW]["step_s"], FASTER[workload["name"]]
            most = rows[SLOW, DENSE]["step_s"] / rows[SLOW, ALONE]["step_s"]
            what = (
                f"{name}, {SLOW}: DGC at least {least} times as fast as dense (no communication: {most:.1f})"
            )
            goals.append(bar(what, times, least))
    return goals


def added(row: dict[str, Any]) -> float:
    """Seconds that the exchange adds to a step, relative to a step without it in the same minute."""
    return float(row["step_s"] - row["alone_s"])


def of_dgc(rows: Rows, link: str) -> list[dict[str, Any]]:
    """DGC's rows on a link: with DDP's own buckets, and with one."""
    return [rows[link, name] for name in (DGC, DGC + WHOLE) if (link, name) in rows]


def split(found: dict[str, Any]) -> list[str]:
    """Return a table of the parts of DGC's exchange, on its own thread next to backward."""
    lines = []
    for workload in found["workloads"]:
        rows = by_place(workload)
        for link in links(workload):
            alone = rows[link, ALONE]
            for row in of_dgc(rows, link):
                parts = (f"{1e3 * row[key]:.0f}" for key in ("encode_s", "communicate_s", "decode_s"))
                more = (added(row), row["processor_s"] - alone["processor_s"])
                cells = (f"{workload['hosts']} hosts, {link}{row['contender'].removeprefix(DGC)}", *parts)
                lines.append((*cells, *(f"{1e3 * each:.0f}" for each in more)))
    heads = (
        "",
        "encode, ms",
        "communicate, ms",
        "decode, ms",
        "added to the step, ms",
        "to the processor, ms",
    )
    return [
        *table(heads, lines),
        "",
        "The first three run on the exchange's own thread, mostly hidden behind backward. Communicating",
        "includes waiting for slower ranks, which share the same cores.",
    ]


def unshaped_lines(found: dict[str, Any]) -> list[str]:
    """Return tables of steps over links as fast as memory."""
    rounds, machine = found["rounds"], found["machine"]
    lines = [
        "Between hosts of a lab whose links are as fast as memory (`python -m benchmarks.steps --link free`),"
        f" on {machine['cores']} cores of {machine['processor']}, median of {rounds}"
        f" round{'s' if rounds > 1 else ''}:",
    ]
    goals = []
    for workload in found["workloads"]:
        rows, name = by_place(workload), f"{workload['hosts']} hosts, {workload['about'].split(',')[0]}"
        lines += ["", f"### {workload['hosts']} hosts, {workload['about']}", "", *results(workload)]
        dense_s = rows[FREE, DENSE]["step_s"]
        for method, most in AS_FAST.items():
            kinds = of_dgc(rows, FREE) if method == DGC else [rows[FREE, method]]
            times = min(row["step_s"] for row in kinds) / dense_s
            what = f"{name}: `{method}` at most {most:g} times a dense step"
            goals.append((what, f"{times:.2f}", "yes" if times <= most else "**no**"))
    return [*lines, "", *table(("goal", "measured", "met"), goals)]


def forecast_lines(found: dict[str, Any]) -> list[str]:
    """Return a table of forecasts and measurements."""
    rows = found["rows"]
    near = sum(abs(row["error"]) <= found["near"] for row in rows)
    lines = [
        (
            row["workload"],
            row["link"],
            row["contender"],
            f"{row['forecast_s']:.3f}",
            f"{row['measured_s']:.3f}",
            f"{100 * row['error']:+.0f} %",
        )
        for row in rows
    ]
    met = "Met" if near >= GOOD * len(rows) else "**Missed**"
    return [
        "Forecasts of `laconic plan` with a probe of the same hosts, compared with steps measured after it",
        f"(`python -m benchmarks.predictions`). {near} of {len(rows)} are within {100 * found['near']:.0f} %;"
        f" goal: 8 of 10. {met}.",
        "",
        *table(("workload", "link", "method", "forecast, s", "measured, s", "off by"), lines),
    ]
