"""Synchrony of ranks, from `weight` (PushSum), `staleness`, `peers` and `rounds` in a strategy's steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Range = tuple[float, float]


@dataclass(frozen=True)
class Notes:
    """Notes of one training. `talk[i][j]`: messages from rank i to j."""

    weight: Range | None = None
    staleness: Range | None = None
    rounds: int | None = None
    talk: tuple[tuple[int, ...], ...] | None = None

    def words(self) -> str:
        """Format all except `talk`.

        >>> Notes(weight=(0.5, 1.25), staleness=(2, 2), rounds=30).words()
        'weights 0.5 to 1.25; staleness 2; 30 rounds'
        """
        parts = [] if self.weight is None else [f"weights {_range(self.weight)}"]
        parts += [] if self.staleness is None else [f"staleness {_range(self.staleness)}"]
        parts += [] if self.rounds is None else [f"{self.rounds:,} round{'s' * (self.rounds != 1)}"]
        return "; ".join(parts)


def read_notes(steps: Iterable[dict[str, Any]]) -> Notes:
    noted = [(event["rank"], event["notes"]) for event in steps if event.get("notes")]
    rounds = [notes["rounds"] for _, notes in noted if "rounds" in notes]
    sent = [(rank, peer) for rank, notes in noted for peer in notes.get("peers", ())]
    return Notes(
        weight=_extremes(notes["weight"] for _, notes in noted if "weight" in notes),
        staleness=_extremes(notes["staleness"] for _, notes in noted if "staleness" in notes),
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
