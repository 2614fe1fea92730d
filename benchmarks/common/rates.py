"""The search for a learning rate: the usual one, then twice and half the best."""

from __future__ import annotations

import math

MOST = 12  # rates at which all diverge


def next_rate(tried: dict[float, float], usual: float) -> float | None:
    """Return the rate to try after these, given the loss of each; None if the best has worse neighbours.

    Raises `ValueError` if the trainings diverge at 12 rates.
    """
    if not tried:
        return usual
    if all(map(math.isinf, tried.values())):
        if len(tried) == MOST:
            raise ValueError(f"trainings diverge at all rates from {min(tried):g} to {max(tried):g}")
        return min(tried) / 2
    best = min(tried, key=lambda rate: tried[rate])
    return next((rate for rate in (2 * best, best / 2) if rate not in tried), None)
