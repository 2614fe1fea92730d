"""Figures of a sparse training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparsityStats:
    """Figures of a sparse training.

    Attributes:
        turn: Steps so far.
        updates: Updates of the masks so far.
        density: Fraction of weights in use in the sparse layers.
        model_density: Fraction of the model's parameters in use, with those that have no mask.
        changed: Fraction of entries in use that the last update added.
        score_bytes: Payload sent by this rank for the dense gradients of the updates.
    """

    turn: int
    updates: int
    density: float
    model_density: float
    changed: float
    score_bytes: int
