"""The list of disturbed runs. Every random choice depends only on fault, spec and number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from tests.laws.strategy_ranks import fits
from tests.laws.table import compressors, specs
from tests.unit.strategy_world import Numbers, sgd

from benchmarks.common.results import Results
from laconic.core.errors import LaconicError
from laconic.core.spec import parse
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.report.ledger import slug

RUNS = Results(Path(__file__).with_name("results.jsonl"))
KILLED, RAISED = "killed", "exception"
STOPPED, PAUSED = "stopped beyond patience", "stopped for a moment"
NOT_FINITE, BUSY = "infinite gradient", "busy machine"
LINK, DISK, LAUNCHER = "link down", "full disk", "launcher killed"
STRATEGY_FAULTS = (KILLED, RAISED, STOPPED, PAUSED, BUSY)
METHOD_FAULTS = (KILLED, RAISED, PAUSED, NOT_FINITE, BUSY)

SIZES = (3, 4, 2)
TIMES = 3  # runs of each strategy and fault
LINK_SPECS = ("sgp()", "dpsgd()", "local_sgd(every=2)", "diloco(every=2)", "adpsgd()")
DOWN_S = (1.0, 7.0, 30.0)
TRAINED = (
    "dense()",
    "cgx()",
    "dgc(density=0.05)",
    "stc()",
    "sign()",
    "powersgd(rank=2)",
    "sgp()",
    "local_sgd(every=4)",
    "diloco(every=5)",
    "choco()",
)
COMMANDS = 2  # runs of each of these and fault


@dataclass(frozen=True)
class Run:
    """One disturbed run. `at`: step of a rank's fault. `seconds`: length of a stop or link failure."""

    fault: str
    spec: str
    number: int
    size: int
    victim: int
    at: int
    seconds: float

    @property
    def key(self) -> str:
        return f"{self.fault.replace(' ', '_')}/{slug(self.spec)}-{self.number}"

    @property
    def strategy(self) -> bool:
        """Return whether the spec is a strategy."""
        return _is_strategy(self.spec)


@cache
def _is_strategy(spec: str) -> bool:
    return isinstance(strategy_or_method(spec), Strategy)


def runs() -> list[Run]:
    """Return all runs: faults of ranks alternate; busy machines and commands come last."""
    ranks = [
        *([*_of_strategies(fault)] for fault in STRATEGY_FAULTS),
        *([*_of_methods(fault)] for fault in METHOD_FAULTS),
    ]
    alternating = [run for run in chain.from_iterable(zip_longest(*ranks)) if run is not None]
    links = [_run(LINK, spec, i, 3, down) for i, down in enumerate(3 * DOWN_S) for spec in LINK_SPECS]
    others = [
        _run(fault, spec, i, 2) for i in range(COMMANDS) for spec in TRAINED for fault in (DISK, LAUNCHER)
    ]
    return [*sorted(alternating, key=lambda run: run.fault == BUSY), *links, *others]


def _of_strategies(fault: str) -> Iterator[Run]:
    for number in range(TIMES):
        for spec in specs(Strategy):
            if sizes := [size for size in SIZES if _fits(fault, spec, size)]:
                yield _run(fault, spec, number, sizes[number % len(sizes)])


def _fits(fault: str, spec: str, size: int) -> bool:
    """Return whether the strategy supports this number of ranks, and one fewer if a rank is lost."""
    fewer = fault in (KILLED, RAISED, STOPPED) and size > 2
    return _supports(spec, size) and (not fewer or _continues(spec, size - 1))


@cache
def _supports(spec: str, size: int) -> bool:
    return fits(spec, size)


@cache
def _continues(spec: str, size: int) -> bool:
    with suppress(LaconicError):
        parse(spec).check_left(size, sgd(Numbers()))
        return True
    return False


def _of_methods(fault: str) -> Iterator[Run]:
    for spec in compressors():
        yield _run(fault, spec, 0, 2)


def _run(fault: str, spec: str, number: int, size: int, seconds: float | None = None) -> Run:
    rng = random.Random(f"{fault}/{spec}/{number}")
    victim, at = rng.randrange(fault == LINK, size), rng.randrange(2, 20)  # the store is on host 0
    return Run(fault, spec, number, size, victim, at, seconds or round(rng.uniform(0.2, 3.0), 1))
