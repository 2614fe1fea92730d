"""Trial: which rung of a ladder each bucket stands on, found by trying them for a few steps each.

    1. From the most compressed rung down, each is tried for TRIES steps, until one takes TOO_LONG times the
       best step: so no trial ever sends the whole gradient over a link that would take minutes for it. The
       COLD first steps of a rung do not count, nor the WARM_UP first of all: they find memory untouched.
    2. The plan is the least compression among the fastest (see `timetable`).
    3. A plan of several rungs is reckoned from steps on one rung each. Takes its first window of WINDOW steps
       longer than the fastest of those by more than twice the slack, that rung is taken for all buckets.
    4. Every WINDOW steps the least seconds in an exchange, which a busy machine changes little, are compared
       with those of the first window. Have they changed CHANGED times and by a part of the step that MATTERS,
       in two windows running, or have `every` steps passed, it begins again at 1. A plan that a trial finds
       nearly as good is kept, and no change is looked at for a while.

Waiting for a slow rank counts as exchange, as nobody can tell it from the link.

Every figure that decides is the largest of all ranks', so all decide the same at the same step; it costs a
few bytes after each rung and window. What it decides is said in plain words to the logger "laconic".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import torch

from laconic.comm.comm import Comm
from laconic.core.units import told_seconds
from laconic.reducers.timetable import Rungs, Timetable, untried

TRIES, COLD, WARM_UP = 3, 1, 3  # steps of each rung that count, those before them, and those before all
TOO_LONG = 3.0  # times the best step: no rung below is tried
WINDOW = 6  # steps between two looks at the exchange's seconds
CHANGED, MATTERS = 1.5, 0.1  # times more or less, and of the step, and it is another link
PATIENCE, MOST = 24, 96  # steps in which no change is looked at, after one that has led to nothing: doubled
Names = tuple[str, ...]

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class Sample:
    """One step on this rank. `took[b]`: seconds in bucket b's exchange; `came[b]`: when it began, after the
    first; `whole_s`: from the first bucket to that of the next step.
    """

    took: tuple[float, ...]
    came: tuple[float, ...]
    whole_s: float

    @property
    def rest_s(self) -> float:
        """Of the step, outside of the time from the first bucket to the last one's end."""
        return self.whole_s - self.came[-1] - self.took[-1]


class Tried(NamedTuple):
    """A rung's medians, of the slowest rank: seconds in each bucket's exchange, and of a step."""

    took: tuple[float, ...]
    whole_s: float


class Trial:
    """At work on one rank; equal on all. `ways`: the rungs as they are told, from what loses nothing on."""

    def __init__(
        self, ways: Sequence[str], comm: Comm, slack: float, every: int, clock: Callable[[], float]
    ) -> None:
        self.plan: dict[str, int] | None = None  # by tensor name, once decided
        self._ways, self._comm, self._slack, self._every, self._clock = ways, comm, slack, every, clock
        self._trying: int | None = len(ways) - 1  # the rung in trial; None where the plan is in force
        self._cold = WARM_UP  # so many steps of the trial do not count
        self._step = -2
        self._buckets: tuple[Names, ...] = ()  # of the last whole step
        self._present: list[tuple[Names, float, float]] = []  # this step's, so far
        self._samples: list[Sample] = []
        self._tried: dict[int, Tried] = {}  # by rung
        self._rival: tuple[int, float] | None = None  # a rung and its step, where the plan is not proved yet
        self._ready: tuple[float, ...] = ()
        self._rest_s = 0.0
        self.usual_s = 0.0  # in a step's exchange, under the present plan; 0 where not known yet
        self._changed = False  # whether the trial was begun by a change
        self.age = 0  # windows since the last trial
        self._strange = 0  # windows running in which the exchange took another time
        self._rests = 0  # steps for which no change is looked at
        self._patience = PATIENCE

    def resume(self, plan: dict[str, int], usual_s: float) -> None:
        """Go on with what was decided before, when the exchange took so long."""
        self.plan, self._trying, self.usual_s = plan, None, usual_s
        self._samples.clear()

    def rung(self, names: Names) -> int:
        """Where a bucket of these tensors stands."""
        if self._trying is not None:
            return self._trying
        return 0 if self.plan is None else self.plan.get(names[0], len(self._ways) - 1)

    def begin(self, step: int, device: torch.device) -> None:
        """A bucket of this step has come: look at the last step, where this is the first. By all ranks."""
        if step == self._step or len(self._ways) == 1:
            return
        now, last = self._clock(), self._present
        follows, self._step, self._present = step == self._step + 1, step, []
        if not last or not follows:
            return
        buckets = tuple(names for names, _, _ in last)
        if buckets != self._buckets:  # the first step, or DDP has regrouped its buckets after it
            self._buckets = buckets
            if self._trying is None:
                self._samples.clear()
            else:
                self._start_over()
            return
        if self._trying is not None and self._cold:
            self._cold -= 1
            return
        first = last[0][1]
        took = tuple(left - entered for _, entered, left in last)
        self._samples.append(Sample(took, tuple(entered - first for _, entered, _ in last), now - first))
        if self._trying is not None and len(self._samples) == TRIES:
            self._conclude(self._trying, device)
        elif len(self._samples) == WINDOW:
            self._look(device)

    def note(self, names: Names, entered: float, left: float) -> None:
        """This bucket's exchange took place between these times."""
        self._present.append((names, entered, left))

    def void(self) -> None:
        """The present step does not count."""
        self._present = []

    def _start_over(self) -> None:
        self._trying = len(self._ways) - 1
        self._cold = max(self._cold, COLD)
        self._samples.clear()
        self._tried.clear()
        self._ready = ()

    def _conclude(self, rung: int, device: torch.device) -> None:
        """All tries of a rung are done."""
        took = [median(each) for each in zip(*(sample.took for sample in self._samples), strict=True)]
        came = [min(each) for each in zip(*(sample.came for sample in self._samples), strict=True)]
        rest_s = median(sample.rest_s for sample in self._samples)
        whole_s = median(sample.whole_s for sample in self._samples)
        *figures, rest_s, whole_s = self._agreed([*took, *came, rest_s, whole_s], device)
        came = figures[len(took) :]
        self._tried[rung] = Tried(tuple(figures[: len(took)]), whole_s)
        self._rest_s = min(self._rest_s, rest_s) if self._ready else rest_s
        self._ready = tuple(map(min, self._ready, came)) if self._ready else tuple(came)
        self._samples.clear()
        table = self._table()
        steps = [table.step_s((tried,) * len(took)) for tried in sorted(self._tried)]
        if rung == 0 or steps[0] > TOO_LONG * min(steps):
            self._decide(table)
        else:
            self._trying, self._cold = rung - 1, COLD

    def _table(self) -> Timetable:
        none = Tried(untried(len(self._ready)), 0.0)
        tried = [self._tried.get(rung, none) for rung in range(len(self._ways))]
        ideal = Timetable(tuple(each.took for each in tried), self._ready, self._rest_s)
        steps = (ideal.step_s((rung,) * len(self._ready)) for rung in range(len(tried)))
        drag = (max(0.0, each.whole_s - step_s) for each, step_s in zip(tried, steps, strict=True))
        return replace(ideal, drag=tuple(drag))

    def _decide(self, table: Timetable) -> None:
        old = None if self.plan is None else tuple(self.plan.get(names[0], 0) for names in self._buckets)
        plan = table.better(old, self._slack)
        self._trying, self.usual_s, self.age, self._strange = None, 0.0, 0, 0
        if plan != old:
            self._rests, self._patience = 0, PATIENCE
        elif self._changed:
            self._rests, self._patience = self._patience, min(2 * self._patience, MOST)
        self._rival = self._quickest() if len({*plan}) > 1 else None
        self._take(plan)
        if self._comm.rank == 0:
            log.info("from step %d on: %s", self._step, verdict(table, plan, self._ways, self._slack))

    def _take(self, plan: Rungs) -> None:
        self.plan = {name: rung for names, rung in zip(self._buckets, plan, strict=True) for name in names}

    def _quickest(self) -> tuple[int, float]:
        """The lowest of the rungs whose steps were about as fast as the fastest, and its step."""
        most = (1 + self._slack) * min(tried.whole_s for tried in self._tried.values())
        return min((rung, tried.whole_s) for rung, tried in self._tried.items() if tried.whole_s <= most)

    def _prove(self, step_s: float) -> bool:
        """Whether the plan's own steps bear it out; where not, one rung is taken for all buckets."""
        rival, self._rival = self._rival, None
        if rival is None or step_s <= (1 + 2 * self._slack) * rival[1]:
            return True
        rung, whole_s = rival
        self._take((rung,) * len(self._buckets))
        if self._comm.rank == 0:
            log.info(
                "step %d: that takes %s a step in truth, and %s alone took %s: it is taken for all buckets",
                *(self._step, told_seconds(step_s), self._ways[rung], told_seconds(whole_s)),
            )
        return False

    def _look(self, device: torch.device) -> None:
        """A window has passed."""
        in_exchange = min(sum(sample.took) for sample in self._samples)
        exchange_s, step_s = self._agreed(
            [in_exchange, median(sample.whole_s for sample in self._samples)], device
        )
        self._samples.clear()
        self.age += 1
        self._rests = max(0, self._rests - WINDOW)
        usual_s = self.usual_s
        if usual_s == 0:
            self.usual_s = exchange_s if self._prove(step_s) else 0.0
            return
        low, high = sorted((usual_s, exchange_s))
        other = high > CHANGED * low and high - low > MATTERS * step_s and not self._rests
        self._strange = self._strange + 1 if other else 0
        changed = self._strange == 2
        if not changed and self.age * WINDOW < self._every:
            return
        if self._comm.rank == 0:
            was, now = told_seconds(usual_s), told_seconds(exchange_s)
            why = f"the exchange takes {now} a step, it took {was}" if changed else "it is time to look again"
            log.info("step %d: %s: all ways are tried again", self._step, why)
        self._changed = changed
        self._start_over()

    def _agreed(self, figures: Sequence[float], device: torch.device) -> list[float]:
        """The largest of each figure among all ranks."""
        told = torch.tensor(figures, dtype=torch.float64, device=device)
        largest: list[float] = self._comm.all_reduce(told, "max").tolist()
        return largest


def verdict(table: Timetable, plan: Rungs, ways: Sequence[str], slack: float) -> str:
    """What was decided, and why, in plain words."""
    step_s = table.step_s(plan)
    if not any(plan):
        kept = step_s > (1 + slack) * table.step_s(table.fastest)  # nearly as good, and in force already
        return (
            f"{ways[0]}, at {told_seconds(step_s)} a step: nothing is faster by more than"
            f" {2 * slack if kept else slack:.0%},"
            " so this link needs no compression"
        )
    counts = {rung: plan.count(rung) for rung in sorted({*plan})}
    taken = ", ".join(
        ways[rung] + (f" for {count} of {len(plan)} buckets" if len(counts) > 1 else "")
        for rung, count in counts.items()
    )
    waits_s = table.waits_s(plan)
    rest = f"{told_seconds(waits_s)} of it go to the exchange"
    if waits_s <= slack * step_s:
        rest = "the exchange hides behind backward"
    lowest = next(rung for rung, row in enumerate(table.seconds) if row != untried(len(plan)))
    times = table.step_s((lowest,) * len(plan)) / step_s
    beside = f"{times:.1f} times as fast as {ways[lowest]}"
    if lowest:
        beside += ", and less compression was not tried"
    return f"{taken}, at {told_seconds(step_s)} a step, {beside}; {rest}"
