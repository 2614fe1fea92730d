"""A duel: whether the lossier of two candidates pays, from the seconds of steps of each, taken in turns.

Of all pairs of a step of each, the share in which the lossier one is the faster by some part of the step
tells: one half where it is so on the median, and with no difference at all one half with the deviation
sqrt((n + m + 1) / 12 n m), whatever the distribution (Mann and Whitney 1947, doi:10.1214/aoms/1177730491). A
machine that is busy now and then moves it little.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

CLEAR = 0.25  # of a step: such a gain in every pair needs no statistic
LOOKS = (5, 10, 20, 50, 100)  # steps of each after which the statistic is asked; at the last it must answer
SURE, SURE_NOT = 3.0, 2.6  # deviations that end a duel early, for the lossier one and against it
ENOUGH = 2.9  # deviations that the gain must have at the last look


def clear(less: Sequence[float], more: Sequence[float]) -> bool | None:
    """The answer where every step of one candidate is faster than all of the other by `CLEAR`, else None.

    >>> clear([1.0, 1.2], [0.3, 0.4]), clear([0.5], [2.0]), clear([1.0], [0.9])
    (True, False, None)
    """
    if max(more) < (1 - CLEAR) * min(less):
        return True
    return False if max(less) < (1 - CLEAR) * min(more) else None


def pays(less: Sequence[float], more: Sequence[float], gain: float) -> bool | None:
    """Whether the lossier candidate saves `gain` of a step, and surely something; None: go on.

    Args:
        less: seconds of steps of the candidate that loses less.
        more: those of the other.
        gain: the least part of a step that must be saved.

    >>> pays([1.0] * 10, [0.8] * 10, 0.05), pays([1.0] * 10, [0.97] * 10, 0.05), pays([1.0], [0.8], 0.05)
    (True, False, None)
    """
    fewest = min(len(less), len(more))
    if fewest not in LOOKS:  # each look more is one chance more to be wrong
        return None
    faster, by_gain = deviations(less, more, 0.0), deviations(less, more, gain)
    if by_gain <= -SURE_NOT:
        return False
    if faster >= SURE and by_gain >= 0:
        return True
    return None if fewest < LOOKS[-1] else faster >= ENOUGH and by_gain >= 0


def deviations(less: Sequence[float], more: Sequence[float], gain: float) -> float:
    """How far the share of pairs in which `more` takes below 1 - `gain` of `less` is from one half."""
    n, m, ordered = len(less), len(more), sorted(more)
    pairs = sum(bisect_left(ordered, (1 - gain) * each) for each in less)
    return (pairs / (n * m) - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
