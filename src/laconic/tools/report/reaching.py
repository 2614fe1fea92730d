"""Time to accuracy: seconds of steps until a test reaches a target, exact to the interval between tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from laconic.tools.report.curves import Curve, accuracy_by_step
from laconic.tools.report.figure import UNKNOWN, Figure
from laconic.tools.report.series import Array, MethodSeries, SeedSeries


class HasReach(Protocol):
    @property
    def spec(self) -> str: ...
    @property
    def reach_s(self) -> Figure: ...


def seconds_to(seed: SeedSeries, percent: float) -> float:
    reached = seed.eval_steps[100 * seed.accuracy >= percent - 1e-9]
    return float(_seconds_at(seed, reached[:1])[0]) if len(reached) else math.nan


def seconds_of(method: MethodSeries, percent: float) -> Figure:
    found = [seconds_to(seed, percent) for seed in method.seeds]
    return UNKNOWN if any(map(math.isnan, found)) else Figure.of(found)


def accuracy_by_second(method: MethodSeries) -> Curve:
    tested = accuracy_by_step(method)
    seconds = np.stack([_seconds_at(seed, tested.x) for seed in method.seeds]).mean(axis=0)
    return Curve(seconds, tested.y, tested.error)


def faster(rows: Sequence[HasReach], target: float | None) -> str:
    if target is None or not rows:
        return ""
    first = rows[0]
    words = [
        f"{first.reach_s.mean / row.reach_s.mean:.1f} times as fast with {row.spec}"
        for row in rows[1:]
        if not math.isnan(first.reach_s.mean / row.reach_s.mean)
    ]
    if not words:
        return ""
    return (
        f"{target:g} % are reached {', '.join(words)}, beside {first.spec}; seconds are those of steps,"
        " without tests."
    )


def target_of(config: Mapping[str, object]) -> float | None:
    found = config.get("target")
    return float(found) if isinstance(found, (int, float)) else None


def _seconds_at(seed: SeedSeries, steps: Array) -> Array:
    total: Array = np.cumsum(np.pad(seed["step_s"], (1, 0)))[np.searchsorted(seed.steps, steps, "right")]
    return total
