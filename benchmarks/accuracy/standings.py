"""How the contenders stand on one task: means over the available seeds, and differences from dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.contenders import CONTENDERS, SEEDS, Contender
from benchmarks.accuracy.trials import kept
from laconic.tools.report.summary import Figure

Rows = dict[tuple[str, float | None], list[dict[str, Any]]]  # by spec and skew


@dataclass(frozen=True)
class Standing:
    """One method on one task. `lost`: points of accuracy less than its baseline; nan where one is missing.

    `zeros`: share of the weights that are exactly zero.
    """

    contender: Contender
    seeds: int
    accuracy: Figure
    test_loss: Figure
    wire_mb: float
    smaller: float
    diverged: int
    zeros: float
    lost: Figure

    @property
    def verdict(self) -> str:
        """Whether what was promised is kept; empty where nothing is promised, or seeds are still to come."""
        if self.contender.points is None or self.seeds < SEEDS:
            return ""
        if self.diverged:
            return "outside"
        if math.isnan(self.lost.mean):
            return ""
        margin = 0.0 if math.isnan(self.lost.error) else self.lost.error
        return "within" if self.lost.mean <= self.contender.points + margin else "outside"


def standings(task: str, contenders: Sequence[Contender] = CONTENDERS) -> list[Standing]:
    """Of all methods with a training that is done, in the order of the contenders."""
    rows = {(each.spec, each.skew): kept(each, task) for each in contenders}
    return [_standing(each, rows) for each in contenders if rows[each.spec, each.skew]]


def _standing(contender: Contender, found: Rows) -> Standing:
    rows = found[contender.spec, contender.skew]
    accuracy = _figure(rows, "accuracy")
    dense = _figure(found.get((contender.against, contender.skew), []), "accuracy")
    apart = math.hypot(dense.error, accuracy.error)
    return Standing(
        contender=contender,
        seeds=len(rows),
        accuracy=accuracy,
        test_loss=_figure(rows, "test_loss"),
        wire_mb=sum(row["wire_mb"] for row in rows) / len(rows),
        smaller=sum(row["smaller"] for row in rows) / len(rows),
        diverged=sum(row["diverged_at"] is not None for row in rows),
        zeros=sum(row["zeros"] for row in rows) / len(rows),
        lost=Figure(100 * (dense.mean - accuracy.mean), 100 * apart),
    )


def _figure(rows: list[dict[str, Any]], name: str) -> Figure:
    return Figure.of(math.nan if row[name] is None else row[name] for row in rows)
