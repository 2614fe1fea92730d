"""The autotuner: which candidate is in use, found by timing each for a few steps.

    1. The candidate in use is timed first: at the start of a training that is the dense one, which loses
       nothing. If it is the dense one and its exchange takes at most `slack` of a step, it is kept at once.
    2. The others follow, from the one that sends least on, until one takes TOO_LONG times the fastest step.
       Each is in use for COLD steps, which do not count, as memory is touched for the first time, and for
       COUNTED steps. If the exchange takes more than LONG_S in every cold step, those are enough.
    3. Of all whose step takes at most 1 + `slack` times the fastest, the candidate that loses least is kept.
       The one that was kept before is given twice the slack, so that noise does not move it.
    4. Every WINDOW steps the least seconds in an exchange, which a busy machine changes little, are compared
       with those of the first window. If they have changed CHANGED times, and by a part of the step that
       MATTERS, in `patience` windows running, or if `every` steps have passed, it begins again at 1. The
       patience doubles if a change has led to the same candidate.

Whole steps are compared, so interference counts: what an exchange takes from backward's cores. Waiting for a
slow rank counts as exchange, as nobody can tell it from the link. Nothing is predicted: whoever wants to know
what a link will do before a training asks `laconic plan`.

Every figure that decides is the largest of all ranks', so all decide the same at the same step. The logger
"laconic" is told in plain words what is decided, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from laconic.comm.comm import Comm
from laconic.core.units import format_seconds

COLD, COUNTED = 2, 3  # steps of each candidate that do not count, and that do
LONG_S = 1.0  # of an exchange: cold memory changes it little
TOO_LONG = 3.0  # times the fastest step: no candidate that sends more is tried
WINDOW = 6  # steps between two looks at the exchange's seconds
CHANGED, MATTERS = 1.5, 0.1  # times more or less, and of the step, and it is another link
PATIENCE, MAX_PATIENCE = 2, 16  # windows

log = logging.getLogger("laconic")


class Timed(NamedTuple):
    """Seconds of a step: in its exchange, and from its first bucket to that of the next step."""

    exchange_s: float
    whole_s: float


class Autotuner:
    """At work on one rank; equal on all. `names`: the candidates, from what loses nothing on."""

    def __init__(
        self, names: Sequence[str], comm: Comm, slack: float, every: int, clock: Callable[[], float]
    ) -> None:
        self.current = 0  # the candidate in use
        self.chosen: int | None = None  # the last that was chosen
        self.usual_s = 0.0  # in a step's exchange, with the chosen one; 0 where not known yet
        self.windows = 0  # since the last search
        self._names, self._comm, self._slack, self._every, self._clock = names, comm, slack, every, clock
        self._searching = len(names) > 1
        self._step = -2
        self._began: float | None = None  # when this step's first bucket entered, unless the step is void
        self._exchange_s = 0.0  # of this step, so far
        self._steps: list[Timed] = []  # of the candidate in a search, or of the window
        self._measured: dict[int, float] = {}  # seconds of a step, by candidate
        self._strange = 0  # windows running in which the exchange took another time
        self._patience = PATIENCE
        self._changed = False  # whether a change began the search

    def resume(self, chosen: int, usual_s: float) -> None:
        """Go on with what was chosen before, when the exchange took so long."""
        self.current = self.chosen = chosen
        self.usual_s, self._searching = usual_s, False
        self._steps.clear()

    def begin(self, step: int, device: torch.device) -> None:
        """A bucket of this step has come. Called by all ranks; the step's first looks at the step before."""
        if step == self._step or len(self._names) == 1:
            return
        now, began, follows = self._clock(), self._began, step == self._step + 1
        self._step, self._began = step, None
        if began is None or not follows:
            return
        self._steps.append(Timed(self._exchange_s, now - began))
        if self._searching:
            self._search(device)
        elif len(self._steps) == WINDOW:
            self._watch(device)

    def note(self, entered: float, left: float) -> None:
        """A bucket's exchange took place between these times."""
        if self._began is None:
            self._began, self._exchange_s = entered, 0.0
        self._exchange_s += left - entered

    def void(self) -> None:
        """The present step does not count."""
        self._began = None

    def _search(self, device: torch.device) -> None:
        """One more step of the candidate that is timed."""
        self._steps[-1] = self._slowest(self._steps[-1], device)
        cold, counted = self._steps[:COLD], self._steps[COLD:]
        long = len(cold) == COLD and min(step.exchange_s for step in cold) > LONG_S
        if len(counted) < COUNTED and not long:
            return
        exchange_s, whole_s = map(median, zip(*(counted or cold), strict=True))
        self._measured[self.current] = whole_s
        untried = [each for each in range(len(self._names)) if each not in self._measured]
        hidden = self.current == 0 and exchange_s <= self._slack * whole_s
        self._steps = []
        if untried and not hidden and whole_s <= TOO_LONG * min(self._measured.values()):
            self.current = untried[-1]
        else:
            self._decide()

    def _decide(self) -> None:
        old, fastest = self.chosen, min(self._measured.values())

        def near(candidate: int) -> bool:
            slack = self._slack * (2 if candidate == old else 1)
            return self._measured[candidate] <= (1 + slack) * fastest

        self.chosen = self.current = min(filter(near, self._measured))
        if self.chosen != old:
            self._patience = PATIENCE
        elif self._changed:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._searching, self.usual_s, self.windows, self._strange = False, 0.0, 0, 0
        if self._comm.rank == 0:
            log.info("from step %d on: %s", self._step, verdict(self._measured, self.chosen, self._names))

    def _watch(self, device: torch.device) -> None:
        """A window has passed."""
        exchange, whole = zip(*self._steps, strict=True)
        exchange_s, whole_s = self._slowest(Timed(min(exchange), median(whole)), device)
        self._steps = []
        self.windows += 1
        usual_s = self.usual_s
        if usual_s == 0:
            self.usual_s = exchange_s
            return
        low, high = sorted((usual_s, exchange_s))
        strange = high > CHANGED * low and high - low > MATTERS * whole_s
        self._strange = self._strange + 1 if strange else 0
        self._changed = self._strange == self._patience
        if not self._changed and self.windows * WINDOW < self._every:
            return
        if self._comm.rank == 0:
            why = "it is time to look again"
            if self._changed:
                was, now = format_seconds(usual_s), format_seconds(exchange_s)
                why = f"the exchange takes {now} a step, it took {was}"
            log.info("step %d: %s: the candidates are tried again", self._step, why)
        self._searching = True
        self._measured = {}

    def _slowest(self, step: Timed, device: torch.device) -> Timed:
        """The largest of each figure among all ranks."""
        figures = torch.tensor(step, dtype=torch.float64, device=device)
        return Timed(*self._comm.all_reduce(figures, "max").tolist())


def verdict(measured: dict[int, float], chosen: int, names: Sequence[str]) -> str:
    """What was decided, and why, in plain words.

    >>> verdict({0: 0.4, 2: 0.1, 1: 0.2}, 2, ["sum()", "sum(dtype='fp16')", "gather(sign())"])
    'gather(sign()), at 100 ms a step, 4.0 times as fast as sum()'
    """
    step_s, least = measured[chosen], min(measured)
    kept = f"{names[chosen]}, at {format_seconds(step_s)} a step"
    if chosen:
        times = f"{measured[least] / step_s:.1f} times as fast as {names[least]}"
        return f"{kept}, {times}" + (", and less compression was not tried" if least else "")
    if len(measured) == 1:
        return f"{kept}, of which the exchange is a small part: this link needs no compression"
    gain = step_s / min(measured.values()) - 1
    faster = f"is faster by more than {gain:.1%}" if gain else "is faster"
    return f"{kept}, and nothing {faster}: this link needs no compression"
