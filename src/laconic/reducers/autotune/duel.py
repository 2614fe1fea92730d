"""Duel: test whether the lossier of two candidates pays, from alternately timed steps of each.

The statistic is the share of all pairs of steps in which the lossier candidate saves `gain`. Without a
difference its deviation from one half is sqrt((n + m + 1) / 12 n m), for any distribution (Mann and Whitney
1947, doi:10.1214/aoms/1177730491).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

CLEAR = 0.25  # gain in every pair that needs no test
SURE, SURE_NOT = 3.0, 2.6  # deviations for and against the lossier one


class Looks(NamedTuple):
    """Steps of each at which to test; the last test must decide. `enough`: deviations for the lossier one."""

    steps: tuple[int, ...]
    enough: float


QUICK = Looks((5, 10, 15), 1.6)  # wrong once in 20 without a difference
FULL = Looks((5, 10, 20, 50, 100), 2.9)


def clear(less: Sequence[float], more: Sequence[float]) -> bool | None:
    """Return whether the lossier candidate is faster by `CLEAR` in every pair; None unless all agree.

    >>> clear([1.0, 1.2], [0.3, 0.4]), clear([0.5], [2.0]), clear([1.0], [0.9])
    (True, False, None)
    """
    if max(more) < (1 - CLEAR) * min(less):
        return True
    return False if max(less) < (1 - CLEAR) * min(more) else None


class Answer(NamedTuple):
    """Whether the lossier candidate pays. `sure`: significant before the last test."""

    pays: bool
    sure: bool


def decide(
    less: Sequence[float], more: Sequence[float], gain: float, looks: Looks = FULL, *, tested: int = 0
) -> Answer | None:
    """Return whether the lossier candidate (seconds `more`) saves `gain` of a step; None to continue.

    `tested`: steps of each at the last call.

    >>> decide([1.0] * 10, [0.8] * 10, 0.05), decide([1.0], [0.8], 0.05)
    (Answer(pays=True, sure=True), None)
    """
    fewest, last = min(len(less), len(more)), looks.steps[-1]
    if not any(tested < look <= fewest for look in looks.steps) and fewest < last:
        return None  # each additional test adds a chance of error
    faster, by_gain = deviations(less, more, 0.0), deviations(less, more, gain)
    if by_gain <= -SURE_NOT:
        return Answer(False, True)
    if faster >= SURE and by_gain >= 0:
        return Answer(True, True)
    return None if fewest < last else Answer(faster >= looks.enough and by_gain >= 0, False)


def deviations(less: Sequence[float], more: Sequence[float], gain: float) -> float:
    """Return the deviation from one half of the share of pairs with `more` below 1 - `gain` of `less`."""
    n, m, ordered = len(less), len(more), sorted(more)
    pairs = sum(bisect_left(ordered, (1 - gain) * each) for each in less)
    return (pairs / (n * m) - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
