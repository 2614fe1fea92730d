"""Timetable: what each bucket's exchange takes in each of several ways, and which of them to go.

The ways, rungs of a ladder, stand in order of what they lose: rung 0 loses nothing. One thread exchanges the
buckets in turn, while backward makes the next ones:

    bucket b is done    seconds[rung_b][b] after it is ready and bucket b - 1 is done
    step                rest + the last bucket done + the drag of each bucket's rung

An exchange wants cores and memory that backward wants too. So a step whose buckets all stand on one rung may
take longer than this says: by the drag of that rung, which its buckets share as they share its seconds.

The plan is the one that loses least of those about as fast as the fastest: early buckets, of which there is
time to hide more, may stand on lower rungs than late ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

Rungs = tuple[int, ...]  # where each bucket stands


@dataclass(frozen=True)
class Timetable:
    """Seconds of the slowest rank. `seconds[rung][bucket]`, infinite where not tried; `ready[bucket]` after
    the first bucket is; `rest_s` of a step before the first bucket is ready and after the last is done;
    `drag[rung]`, none where it is left out.
    """

    seconds: tuple[tuple[float, ...], ...]
    ready: tuple[float, ...]
    rest_s: float
    drag: tuple[float, ...] = ()

    def step_s(self, plan: Sequence[int]) -> float:
        """What a step takes.

        >>> Timetable(((3.0, 3.0), (1.0, 1.0)), ready=(0.0, 2.0), rest_s=4.0).step_s((0, 1))
        8.0
        """
        done = drag = 0.0
        for bucket, (rung, ready) in enumerate(zip(plan, self.ready, strict=True)):
            done = max(done, ready) + self.seconds[rung][bucket]
            drag += self._drags[rung][bucket]
        return self.rest_s + done + drag

    @cached_property
    def _drags(self) -> tuple[tuple[float, ...], ...]:
        """Each bucket's share of its rung's drag."""
        rows = []
        for row, drag in zip(self.seconds, self.drag or (0.0,) * len(self.seconds), strict=True):
            whole = sum(row)
            rows.append(tuple(drag * each / whole if 0 < whole < inf else 0.0 for each in row))
        return tuple(rows)

    def waits_s(self, plan: Sequence[int]) -> float:
        """How much longer a step takes than if no bucket took any time."""
        return self.step_s(plan) - self.rest_s - max(self.ready)

    @property
    def fastest(self) -> Rungs:
        """Each bucket on its quickest rung; or all on one, where that is faster for its drag."""
        buckets, rungs = range(len(self.ready)), range(len(self.seconds))
        quickest = (
            min(rungs, key=lambda rung: self.seconds[rung][bucket] + self._drags[rung][bucket])
            for bucket in buckets
        )
        return min(tuple(quickest), *((rung,) * len(buckets) for rung in rungs), key=self.step_s)

    def least(self, slack: float) -> Rungs:
        """The lowest rungs with which a step takes at most 1 + `slack` times that of the fastest.

        All buckets go down a rung before one goes down two, early ones first.

        >>> Timetable(((3.0, 3.0), (1.0, 1.0)), ready=(0.0, 3.0), rest_s=4.0).least(slack=0.05)
        (0, 1)
        """
        plan = [*self.fastest]
        limit = (1 + slack) * self.step_s(plan)
        moved = True
        while moved:
            moved = False
            for bucket, rung in enumerate(plan):
                for lower in reversed(range(rung)):
                    plan[bucket] = lower
                    if self.step_s(plan) <= limit:
                        moved = True
                        break
                    plan[bucket] = rung
        return tuple(plan)

    def better(self, old: Sequence[int] | None, slack: float) -> Rungs:
        """The least, or the `old` plan where that is nearly it: a rung away, within twice the slack."""
        chosen = self.least(slack)
        if old is None or len(old) != len(chosen):
            return chosen
        near = all(abs(was - now) <= 1 for was, now in zip(old, chosen, strict=True))
        as_fast = self.step_s(old) <= (1 + 2 * slack) * self.step_s(self.fastest)
        return tuple(old) if near and as_fast else chosen


def untried(buckets: int) -> tuple[float, ...]:
    """The row of a rung that nobody has tried."""
    return (inf,) * buckets
