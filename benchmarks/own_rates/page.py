"""docs/own_rates.md: accuracy that methods lose at their best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from textwrap import fill

from benchmarks.common.small_net import SMALL_GPT, SMALL_NET
from benchmarks.common.tables import WIDTH, spread, table
from benchmarks.common.workers import WORKERS, Row
from benchmarks.own_rates import curves, densities
from benchmarks.own_rates.__main__ import DIVERGED, Run, ended, own_rate, runs
from benchmarks.own_rates.families import FAMILIES, LOCAL_MOMENTUM, LONG_GPT, SEEDS, Family

HEAD = f"""# Each method at its own learning rate

`make docs` writes this page from the results of `python -m benchmarks.own_rates`. Each training is a line of
benchmarks/own_rates/results.jsonl, by task, method, rate and seed.

Noise and delay call for a different learning rate. {WORKERS} workers train a small convolutional net
on CIFAR-10 or MNIST, {SMALL_NET.batch} images per worker and step, and a small transformer on Shakespeare,
letter by letter, {SMALL_GPT.batch} windows per worker and step, in bf16 autocast. Each method's rate is
searched with the first seed: its family's usual one, then twice and half of the best rate, until both
neighbours of the best have a larger test loss. That seed is in the mean, and differences between
neighbouring rates are often within noise.

*Lost*: points of test accuracy below dense training of the same seeds at *its* best rate, mean ± standard
error over seeds; *at dense's rate*: the loss of the first seed at that rate, "-" if not tried. *MB a worker*:
bytes that the first worker puts on the wire, inside its machine too; *fewer*: than in dense training. Rows
with one seed support no claim.
"""
AFTER = {LOCAL_MOMENTUM: densities.section, LONG_GPT: curves.section}  # lines after their tables
TOLD = ("method", "rate", "accuracy, %", "lost", "at dense's rate", "MB a worker", "fewer", "seeds")


def page() -> str:
    """Return the page: of each family a table of the methods with their own rates, and what is missing."""
    lines = [HEAD]
    for family in FAMILIES:
        found = [*rows(family)]
        lines += [
            f"## {family.name}, {family.steps:,} steps",
            "",
            *([fill(family.why, WIDTH), ""] if family.why else []),
            *([*table(TOLD, found), ""] if found else []),
            *(AFTER[family]() if family in AFTER else []),
            *incomplete(family),
        ]
    return "\n".join(lines)


def done() -> bool:
    """Return whether the page has a table."""
    return any(own_rate(family, family.baseline) is not None for family in FAMILIES)


def rows(family: Family) -> Iterator[Sequence[str]]:
    """The baseline, then the others that have found their rate."""
    base = runs(family.baseline, family)
    if not base:
        return
    rate = next(iter(base.values()))["lr"]
    for spec in family.specs:
        its = runs(spec, family)
        if not its:
            continue
        own = next(iter(its.values()))["lr"]
        both = [seed for seed in its if seed in base]
        sent, whole = (statistics.mean(each[seed]["sent_mb"] for seed in both) for each in (its, base))
        told = [f"`{spec}`", f"{own:g}", spread([100 * row["accuracy"] for row in its.values()])]
        if spec == family.baseline:
            yield [*told, "", "", f"{sent:.4g}", "", str(len(its))]
            continue
        lost = spread(points_lost(spec, family))
        at_its = shared(family, spec, rate, base)
        yield [*told, lost, at_its, f"{sent:.4g}", f"{whole / sent:.1f} times", str(len(its))]


def incomplete(family: Family) -> list[str]:
    """Return a paragraph on the methods that lack seeds."""
    lacking = [
        f"`{spec}` ({len(done)} of {len(seeds)})"
        for spec in family.specs
        if len(done := ended(spec, family)) < len(seeds := family.seeds(spec))
    ]
    return [fill(f"Seeds that are not done: {', '.join(lacking)}.", WIDTH), ""] if lacking else []


def points_lost(spec: str, family: Family) -> list[float]:
    """Return the points of accuracy below the baseline, by seed; nothing until the method's rate is known."""
    its, base = (runs(each, family) for each in (spec, family.baseline))
    return [100 * (base[seed]["accuracy"] - its[seed]["accuracy"]) for seed in its if seed in base]


def shared(family: Family, spec: str, rate: float, base: dict[int, Row]) -> str:
    """Return the loss of the first seed at dense training's rate, if that was tried."""
    row = Run(family, spec, rate, SEEDS[0]).read()
    if row is None or SEEDS[0] not in base:
        return "-"
    return DIVERGED if DIVERGED in row else f"{100 * (base[SEEDS[0]]['accuracy'] - row['accuracy']):.2f}"
