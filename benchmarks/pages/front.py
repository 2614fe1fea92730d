"""The blocks of README.md and of the first pages: where to begin, how many names there are, the demo."""

from __future__ import annotations

from textwrap import fill

from benchmarks.common.results import read
from benchmarks.common.tables import plus_minus, table
from benchmarks.pages.situations import SITUATIONS
from laconic.methods import catalogue
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.cli.entries import FEW, MANY, figures
from laconic.tools.cli.methods import times
from laconic.tools.cli.presets import PRESETS

WIDTH = 116  # of text between the tables


def presets() -> str:
    """The specs to begin with, and how many times fewer bytes than dense they send."""
    heads = ("begin with", "when", *(f"fewer bytes, N = {size}" for size in (FEW, MANY)))
    rows = [
        [f"`{each.spec}`", each.when, *(fewer(each.spec, size) for size in (FEW, MANY))] for each in PRESETS
    ]
    about = (
        "*Fewer bytes*: how many times less a rank sends than by a dense all-reduce among N ranks: matrices"
        " of a small stored gradient, after any warm-up, without headers; of `diloco()`, its period."
    )
    return "\n".join([*table(heads, rows), "", fill(about, WIDTH)])


def fewer(spec: str, size: int) -> str:
    """How many times less than a dense all-reduce among `size` ranks; and if that falls with each added."""
    made = strategy_or_method(spec)
    if isinstance(made, Strategy):  # a dense all-reduce now and then
        return str(made.period)
    found = figures().get(repr(made)) or figures().get(f"{spec[:-1]}, warmup_steps=100)")
    if found is None:
        return "the link decides"
    falls = ", falls as 1/N" if size == MANY and found.growth.grows else ""
    return f"{times(found.smaller(size))}{falls}"


def registered() -> str:
    """How many names there are, and where they are told."""
    picked = {pick.spec.partition("(")[0] for each in SITUATIONS for pick in each.picks}
    about = (
        f"These are {len(PRESETS)} of {len(catalogue())} names. [Choosing a method](docs/choosing.md) has"
        f" {len(picked)} of them by situation, [every method](docs/methods.md) has all."
        " [`auto()`](docs/auto.md) starts dense and compresses more only as long as that saves time: to 4"
        " bits, or with SGD and momentum to one value in 100, at a cost in short trainings."
    )
    return fill(about, WIDTH)


def demo() -> str:
    """How `make demo` ran, and its table. Times are there where it ran over emulated links, with a target.

    Bytes are those of the whole training, dense steps with which `auto()` begins included.
    """
    found = read("demo")
    rows, target, seeds = found["rows"], found["config"].get("target"), found["config"]["seeds"]
    timed = target is not None and all(row["reach_s"]["mean"] for row in rows)
    timing = (f"seconds to {target:g} %", "times as fast") if timed else ()
    heads = ("method", *timing, "test accuracy, %", "a worker sent, MB", "fewer than dense")
    lines = []
    for row in rows:
        cells = [f"`{row['spec']}`"]
        if timed:
            mean = row["reach_s"]["mean"]
            cells += [f"{mean:.1f}", f"{rows[0]['reach_s']['mean'] / mean:.1f}"]
        cells += [
            plus_minus(row["accuracy"], 100),
            f"{row['total_mb']:,.1f}",
            f"{rows[0]['total_mb'] / row['total_mb']:.1f} times",
        ]
        lines.append(cells)
    runs = "one run each" if seeds == 1 else f"mean ± standard error of {seeds} seeds"
    over = ", over emulated links of 100 Mbit/s" if timed else ""
    config = found["config"]
    about = (
        f"Digits, a wide net, {config['steps']} steps of SGD at {config['lr']:g}, {config['workers']} workers"
        f"{over}: {runs}, modelled bytes."
    )
    return "\n".join([about, "", *table(heads, lines)])
