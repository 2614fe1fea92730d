"""Figures of a training in two regions, from the records of its ranks."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from benchmarks.common.results import Row
from benchmarks.wan.rank import SMOOTHED, WARM_UP

Record = dict[str, Any]  # of one rank, see `benchmarks.wan.rank`
STEP, LOSS, SECONDS, SENT = range(4)  # of an entry of `done`
Times = tuple[float, float]  # of `time.time`


def time_to_loss(record: Record, target: float) -> Row:
    """Return when the mean of a rank's last losses was at most `target`, and MB sent by then."""
    done = record["done"]
    for end in range(WARM_UP + SMOOTHED, len(done) + 1):
        if statistics.mean(each[LOSS] for each in done[end - SMOOTHED : end]) <= target:
            step, _, seconds, sent = done[end - 1]
            return {"reach_s": seconds, "reach_steps": step + 1, "reach_mb": sent / 1e6}
    last = statistics.mean(each[LOSS] for each in done[-SMOOTHED:])
    return {"reach_s": None, "reach_steps": None, "reach_mb": None, "last_loss": last}


def longest_pause(record: Record, cut: Times | None) -> float:
    """Return the longest time between two steps: after the warm-up, or from the beginning of the cut."""
    seconds = [each[SECONDS] for each in record["done"]]
    begin = cut[0] - record["began"] if cut else seconds[min(WARM_UP, len(seconds) - 2)]
    return max((after - before for before, after in pairwise(seconds) if after >= begin), default=0.0)


def steps_during(record: Record, cut: Times) -> int:
    """Return the number of steps that ended while the region was cut off."""
    down, up = (each - record["began"] for each in cut)
    return sum(down <= each[SECONDS] < up for each in record["done"])
