"""Figures of a sparse training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparsityStats:
    """Figures of a sparse training.

    Attributes:
        turn: Steps so far.
        updates: Updates of the masks so far.
        density: Share of the treated layers' weights that are in use.
        changed: Share of the entries in use that the last update brought.
        score_bytes: Payload that this rank has sent for the scores: the dense gradients of the updates.
    """

    turn: int
    updates: int
    density: float
    changed: float
    score_bytes: int
