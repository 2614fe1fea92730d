"""Turns of mask updates, and the fraction of entries that drops."""

from __future__ import annotations

import math


def due(turn: int, steps: int, every: int, until: float) -> bool:
    """Return whether turn is one of 0, every, 2 * every, ... up to until * steps.

    >>> [turn for turn in range(10) if due(turn, 10, every=3, until=0.7)]
    [0, 3, 6]
    """
    return turn % every == 0 and turn <= until * steps


def fraction(turn: int, steps: int, drop: float, until: float) -> float:
    """Return drop / 2 * (1 + cos(pi * turn / (until * steps))).

    >>> [round(fraction(turn, 100, drop=0.3, until=0.8), 3) for turn in (0, 40, 80)]
    [0.3, 0.15, 0.0]
    """
    return drop / 2 * (1 + math.cos(math.pi * min(1.0, turn / (until * steps))))
