"""Statistics of sparse training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SparsityStats:
    """Statistics of sparse training.

    Attributes:
        turn: Steps so far.
        updates: Mask updates so far.
        density: Fraction in use in the sparse layers.
        model_density: The same for all parameters.
        changed: Fraction of entries in use that the last update added.
        score_bytes: Payload of dense gradients sent by this rank.
    """

    turn: int
    updates: int
    density: float
    model_density: float
    changed: float
    score_bytes: int
