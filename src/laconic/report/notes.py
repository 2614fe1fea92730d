"""What ranks tell of how they stay together: who sent to whom, PushSum weights, staleness, rounds.

A step of a strategy may carry notes: `weight` (its rank's PushSum weight), `staleness` (steps), `peers` (the
ranks it sent to) and `rounds` (until then). Each may be missing, and others may be there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Range = tuple[float, float]


@dataclass(frozen=True)
class Notes:
    """Of one training: None for what no rank told. `talk[i][j]`: how often rank i sent to rank j."""

    weight: Range | None = None
    staleness: Range | None = None
    rounds: int | None = None
    talk: tuple[tuple[int, ...], ...] | None = None

    def words(self) -> str:
        """All but who sent to whom, in a line; "" where there is nothing.

        >>> Notes(weight=(0.5, 1.25), staleness=(2, 2), rounds=30).words()
        'weights 0.5 to 1.25; staleness 2; 30 rounds'
        """
        told = [] if self.weight is None else [f"weights {_range(self.weight)}"]
        told += [] if self.staleness is None else [f"staleness {_range(self.staleness)}"]
        told += [] if self.rounds is None else [f"{self.rounds:,} round{'s' * (self.rounds != 1)}"]
        return "; ".join(told)


def read_notes(steps: Iterable[dict[str, Any]]) -> Notes:
    """The notes in one training's steps, of all ranks."""
    told = [(event["rank"], event["notes"]) for event in steps if event.get("notes")]
    rounds = [notes["rounds"] for _, notes in told if "rounds" in notes]
    sent = [(rank, peer) for rank, notes in told for peer in notes.get("peers", ())]
    return Notes(
        weight=_extremes(notes["weight"] for _, notes in told if "weight" in notes),
        staleness=_extremes(notes["staleness"] for _, notes in told if "staleness" in notes),
        rounds=max(rounds, default=None),
        talk=_counts(sent, 1 + max(map(max, sent))) if sent else None,
    )


def _counts(sent: list[tuple[int, int]], size: int) -> tuple[tuple[int, ...], ...]:
    counts = [[0] * size for _ in range(size)]
    for rank, peer in sent:
        counts[rank][peer] += 1
    return tuple(map(tuple, counts))


def _extremes(values: Iterable[float]) -> Range | None:
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else None


def _range(found: Range) -> str:
    low, high = (f"{value:.4g}" for value in found)
    return low if low == high else f"{low} to {high}"
