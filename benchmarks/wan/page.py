"""docs/wan.md: training in two regions, from benchmarks/wan/results.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill

from benchmarks.common.results import Row
from benchmarks.common.tables import WIDTH, table
from benchmarks.wan.__main__ import ALONE, CUT_S, DENSE, LINKS, NEAR, SPECS, TARGET, Run
from benchmarks.wan.rank import PATIENCE_S, SMOOTHED, WARM_UP
from benchmarks.wan.trial import IN_REGION

HEAD = f"""# Two regions, a wide-area link

`make docs` writes this page from the results of `python -m benchmarks.wan`. Each row is a line of
benchmarks/wan/results.jsonl, by link and method.

Each of two regions is a host of a [lab](lab.md) with two ranks and one link. Packets between them are delayed
by this time each way, plus or minus a tenth, and one in 10,000 is lost, which limits a TCP connection to less
than the link's rate. Four ranks train a small GPT of 634,496 parameters on Shakespeare by AdamW, each
method at its [own rate](own_rates.md), here constant after the warm-up, until the first rank's mean training
loss of {SMOOTHED} steps is at most {TARGET:g}. The four ranks share two cores, also with the relay of the
packets if the kernel has no netem: on separate machines, links would matter more. MB: sent by the first
region's interface until then, with headers. *Longest pause*: between two steps of a rank, after the first
{WARM_UP}.

One run per row, while other trainings ran with the lowest priority: rows of similar methods may differ by
chance.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *alone(), *undisturbed(), *cut()])


def pages(folder: Path) -> dict[Path, Callable[[], str]]:
    """Return what writes the page; nothing without results."""
    return {folder / "wan.md": page} if any(rows(link) for link in LINKS) else {}


def rows(link: str, *, is_cut: bool = False) -> dict[str, Row]:
    """Return the stored rows of a link, by spec."""
    found = {spec: Run(link, spec, is_cut).read() for spec in SPECS}
    return {spec: row for spec, row in found.items() if row is not None}


def alone() -> Iterator[str]:
    """Yield a paragraph on dense training in one region."""
    row = Run(ALONE, DENSE).read()
    if row is not None and row["reach_s"] is not None:
        words = (
            f"For comparison, `{DENSE}` by the two ranks of one region alone, with half the batch, no link,"
            f" both cores and the rate of four ranks: {row['reach_steps']:,} steps, {row['reach_s']:.0f} s."
            " For so small a model and so high a loss two regions on the same cores may be slower than one:"
            " the tables compare methods with each other."
        )
        yield fill(words, WIDTH)
        yield ""


def undisturbed() -> Iterator[str]:
    """Yield a table per link."""
    for link in LINKS:
        if not (found := rows(link)):
            continue
        machine, dense = next(iter(found.values()))["machine"], found.get(DENSE)
        yield f"## {link}"
        yield ""
        rate = "" if dense is None else measured_rate(dense["network"])
        yield f"On {machine['cores']} cores of {machine['processor']}.{rate}"
        yield ""
        heads = ("method", "rate", "steps", "seconds", "sooner than dense", "MB", "longest pause, s")
        yield from table(heads, [cells(spec, row, dense) for spec, row in found.items()])
        if absent := [f"`{spec}`" for spec in SPECS if spec not in found]:
            yield ""
            yield f"Not done yet: {', '.join(absent)}."
        yield ""


def cells(spec: str, row: Row, dense: Row | None) -> tuple[str, ...]:
    """Return the cells of a training without a cut."""
    pause = f"{max(row['pause_s']):.1f}"
    if row["reach_s"] is None:
        after = f"not reached: {row['last_loss']:.2f} after {row['steps'][0]} steps, {row['seconds']:.0f} s"
        return f"`{spec}`", f"{row['lr']:g}", "", after, "", "", pause
    sooner = "" if dense is None or spec == DENSE else times(dense, row["reach_s"])
    figures = f"{row['reach_steps']:,}", f"{row['reach_s']:.0f}", sooner, f"{row['reach_mb']:.1f}", pause
    return f"`{spec}`", f"{row['lr']:g}", *figures


def measured_rate(network: dict[str, float]) -> str:
    """Return a sentence on the link, measured by all-reduces of all ranks."""
    rate = 8 * network["bytes_a_second"] / 1e6
    return (
        f" Measured by all-reduces: {1e3 * network['latency_s']:.0f} ms a message, {rate:.1f} Mbit/s a rank."
    )


def times(dense: Row, reach_s: float) -> str:
    """Return how many times sooner than dense training; a lower bound if that has not reached the loss."""
    if dense["reach_s"] is None:
        return f"more than {dense['seconds'] / reach_s:.1f} times"
    return f"{dense['reach_s'] / reach_s:.1f} times"


def cut() -> Iterator[str]:
    """Yield the table of trainings in which the second region is cut off."""
    if not (found := rows(NEAR, is_cut=True)):
        return
    yield f"## One region is cut off for {CUT_S:g} s"
    yield ""
    yield f"At {NEAR}, `patience_s={PATIENCE_S:g}`: ranks that are silent for so long count as lost, others"
    yield "continue without them, and they rejoin when they are back. *Steps*: of a rank of each region while"
    yield "the second is cut off. *Longest pause*: between two steps of a rank, from then on. *At the"
    yield "end*: whether all ranks are back, with the same model to the bit. Seconds include the"
    yield "pause; without the second region, the first has both cores to itself."
    yield ""
    before, lines = rows(NEAR), []
    for spec, row in found.items():
        steps = row["during_cut"]
        undisturbed_s = before[spec]["reach_s"] if spec in before else None
        pauses = (f"{max(part):.1f}" for part in split(row["pause_s"]))
        lines.append(
            (
                f"`{spec}`",
                *(f"{min(part)}" for part in split(steps)),
                *pauses,
                seconds(row["reach_s"]),
                seconds(undisturbed_s),
                outcome(row),
            )
        )
    heads = (
        "method",
        "steps, first region",
        "steps, second",
        "longest pause, first, s",
        "second, s",
        "seconds to the loss",
        "without the cut",
        "at the end",
    )
    yield from table(heads, lines)
    yield ""


def split(by_rank: list[float]) -> tuple[list[float], list[float]]:
    """Return the figures of the ranks of each region."""
    return by_rank[:IN_REGION], by_rank[IN_REGION:] or [math.nan]


def outcome(row: Row) -> str:
    """Return how a training with a cut has ended."""
    return "**lost ranks**" if not row["returned"] else "equal" if row["alike"] else "**not equal**"


def seconds(found: float | None) -> str:
    """Return seconds for a table, "-" if they are not known."""
    return "-" if found is None else f"{found:.0f}"
