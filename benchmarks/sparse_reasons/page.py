"""The part of docs/sparse_steps.md that measures why top-k stays below dense training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.tables import spread, table
from benchmarks.common.workers import Row
from benchmarks.sparse_reasons.__main__ import DENSITY, STEPS, TRIES, Run
from benchmarks.sparse_steps.__main__ import LR, SEEDS
from benchmarks.sparse_steps.__main__ import Run as Plain

# of benchmarks.sparse_steps, by density
PLAIN = {"dense": 1.0, "topk": DENSITY, "stc": DENSITY, "dgc": DENSITY}
WHY = f"""## Why top-k stays below dense training

With `topk` and `stc` the optimiser applies momentum to entries that are already late, so they act for ten
more steps. `dgc` applies its momentum before the exchange. The rows change one thing at a time,
`python -m benchmarks.sparse_reasons`, {STEPS:,} steps; without momentum the rate is ten times as high:
"""


def section() -> list[str]:
    """The table of all tries that are done; nothing before the first of them is."""
    tried = {name: its for name in TRIES if (its := done([Run(name, seed) for seed in SEEDS]))}
    if not tried:
        return []
    plain = {
        name: done([Plain(name, density, STEPS, seed) for seed in SEEDS]) for name, density in PLAIN.items()
    }
    rows = [row(name, its, LR, 0.9) for name, its in plain.items() if its]
    rows += [row(name, its, TRIES[name].rate * LR, its[0]["momentum"]) for name, its in tried.items()]
    lines = table(("what", "rate", "momentum", "accuracy, %", "seeds"), rows)
    return [WHY, *lines, "", *claims(plain, tried), ""]


def claims(plain: dict[str, list[Row]], tried: dict[str, list[Row]]) -> list[str]:
    """What leaving momentum out does to each method, in points."""
    return [
        f"- `{name}(density={DENSITY:g})` ends {abs(by):.2f} points {'higher' if by > 0 else 'lower'} without"
        " momentum."
        for name in ("topk", "stc")
        if (its := tried.get(f"{name}, no momentum")) and plain[name]
        for by in (100 * (mean(its) - mean(plain[name])),)
    ]


def done(runs: Sequence[Run | Plain]) -> list[Row]:
    """The runs that are done."""
    return [found for run in runs if (found := run.read()) is not None]


def mean(its: Sequence[Row]) -> float:
    """The mean accuracy, in [0, 1]."""
    return statistics.mean(each["accuracy"] for each in its)


def row(name: str, its: Sequence[Row], rate: float, momentum: float) -> tuple[str, ...]:
    """A line of the table."""
    told = spread([100 * each["accuracy"] for each in its])
    return name, f"{rate:g}", f"{momentum:g}", told, str(len(its))
