"""The autotuner: which candidate is in use, found by timing them in turns.

    1. A training starts with the first candidate, which loses nothing. The next lossier one is tried in turns
       with it, COUNTED steps each, until it is plain whether it pays (`duel`): whether it saves `gain` of a
       step, and by more than chance. If so it is kept, and the next is tried beside it.
    2. MISSES candidates running that do not pay end the search, and so does an exchange of at most `gain` of
       a step, which nothing can shorten by more. Of two that time cannot tell apart the less lossy one is
       kept. Where the seconds of one have clearly changed, the link has, and both are timed anew.
    3. These steps do not count: the first COLD of each candidate, as memory is touched for the first time;
       the first after each change; dense ones that also send what others left behind. An exchange of more
       than LONG_S counts at once, and FEW steps of each, or one of more than WAIT_S, are enough where one
       candidate is clearly faster: a slow link carries few dense gradients.
    4. Every WINDOW steps the least seconds in an exchange, which a busy machine changes little, are compared
       with those of the first window. Where they have changed CHANGED times, and by a part of the step that
       MATTERS, in `patience` windows running, it searches again: if they are more, among the lossier ones; if
       less, among the less lossy ones, until MISSES running are slower than the one in use. After `every`
       steps it looks both ways. The patience doubles if a change has led to the same candidate.

Whole steps are compared, so interference counts: what an exchange takes from backward's cores. Nothing is
predicted: whoever wants to know what a link will do before a training asks `laconic plan`.

What decides are the slowest rank's step and the shortest of the ranks' exchanges, as the other ranks have
waited in theirs for that one. So all decide the same at the same step. The logger "laconic" is told in plain
words what is decided, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from laconic.comm.comm import Comm
from laconic.core.units import format_seconds
from laconic.reducers.autotune.search import LESS, MORE, Search, Timed, Trial

WINDOW = 6  # steps between two looks at the exchange's seconds
CHANGED, MATTERS = 1.5, 0.1  # times more or less, and of the step, and it is another link
CHANGING = (
    "current",
    "chosen",
    "usual_s",
    "windows",
    "_strange",
    "_patience",
    "_changed",
    "_looked",
    "_trial",
)  # all that an observation changes, but for the seconds of the window and the search
PATIENCE, MAX_PATIENCE = 2, 16  # windows

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class Look:
    """A search: the candidate in use before it, ways to look, candidates that were warm; and steps so far."""

    used: int
    ways: Collection[str]
    warm: frozenset[int]
    timed: tuple[Timed, ...] = ()


class Autotuner:
    """At work on one rank; equal on all.

    Args:
        names: the candidates, from what loses nothing on.
        comm: the group that decides.
        search: how a candidate is found.
        every: steps between two searches on a link that does not change.
        clock: seconds.
        pinned: the candidate that is used, and no search; None where a search decides.
    """

    def __init__(
        self,
        names: Sequence[str],
        comm: Comm,
        search: Search,
        every: int,
        clock: Callable[[], float],
        pinned: int | None = None,
    ) -> None:
        self.current = pinned or 0  # the candidate in use
        self.chosen = pinned  # the last that was chosen
        self.usual_s = 0.0  # in a step's exchange, with the chosen one; 0 where not known yet
        self.windows = 0  # since the last search
        self._names, self._comm, self._search, self._every, self._clock = names, comm, search, every, clock
        self._fixed = pinned is not None or search.last == 0
        self._step = -2
        self._began: float | None = None  # when this step's first bucket entered, unless it is skipped
        self._exchange_s = 0.0  # of this step, so far
        self._apart = False  # this step, so far
        self._steps: list[Timed] = []  # of the window
        self._strange = 0  # windows running in which the exchange took another time
        self._patience = PATIENCE
        self._changed = False  # whether a change began the search
        self._trial: Trial[int] | None = None
        self._looked: Look | None = None  # how the trial has gone so far
        self._before: dict[str, Any] | None = None  # what this step's first bucket has changed
        self._look({MORE})

    def resume(self, chosen: int, usual_s: float) -> None:
        """Go on with what was chosen before, when the exchange took so long; no lossier than may be now."""
        if self._fixed:
            return
        self.current = self.chosen = min(chosen, self._search.last)
        self.usual_s = usual_s if self.chosen == chosen else 0.0
        self._trial = self._looked = self._before = None
        self._steps.clear()

    def begin(self, step: int, device: torch.device) -> None:
        """A bucket of this step has come. Called by all ranks; the step's first looks at the step before."""
        if step == self._step or self._fixed:
            return
        self._before = None
        now, began, follows = self._clock(), self._began, step == self._step + 1
        self._step, self._began = step, None
        if began is None or not follows:
            return
        timed = Timed(self._exchange_s, now - began, self._apart)
        self._before = {name: self.__dict__[name] for name in CHANGING}
        self._before |= {"_steps": [*self._steps], "warm": set(self._search.warm)}
        if self._trial is None:
            self._steps.append(timed)
            if len(self._steps) == WINDOW:
                self._watch(device)
            return
        agreed = self._agreed(timed, device)
        assert self._looked is not None
        self._looked = replace(self._looked, timed=(*self._looked.timed, agreed))
        try:
            self.current = self._trial.send(agreed)
        except StopIteration as end:
            self._decide(end.value)

    def note(self, entered: float, left: float, apart: bool = False) -> None:
        """A bucket's exchange took place between these times; see `Timed.apart`."""
        if self._began is None:
            self._began, self._exchange_s, self._apart = entered, 0.0, False
        self._exchange_s += left - entered
        self._apart |= apart

    def put_back(self) -> None:
        """The present step is skipped: be as before it, but for the seconds of the step before it."""
        self._began = None
        if self._before is None:
            return
        before, self._before = self._before, None
        self._search.warm = set(before.pop("warm"))
        self.__dict__.update(before)
        if self._looked is not None:  # a generator cannot be copied: run it again as far as it was
            self._search.warm = set(self._looked.warm)
            self._trial = self._search.run(self._looked.used, self._looked.ways)
            self.current = next(self._trial)
            for each in self._looked.timed:
                self.current = self._trial.send(each)

    def accept(self) -> None:
        """The present step counts."""
        self._before = None

    def _look(self, ways: Collection[str]) -> None:
        """Begin a search."""
        self._looked = Look(self.current, ways, frozenset(self._search.warm))
        self._trial = self._search.run(self.current, ways)
        self.current = next(self._trial)

    def _decide(self, kept: int) -> None:
        if self.chosen != kept:
            self._patience = PATIENCE
        elif self._changed:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self.chosen = self.current = kept
        self._trial, self.usual_s, self.windows, self._strange = None, 0.0, 0, 0
        self._looked = None
        if self._comm.rank == 0:
            said = verdict(self._search.measured(), kept, self._names, self._search.gain)
            log.info("from step %d on: %s", self._step, said)

    def _watch(self, device: torch.device) -> None:
        """A window has passed."""
        exchange, whole, _ = zip(*self._steps, strict=True)
        exchange_s, whole_s, _ = self._agreed(Timed(min(exchange), median(whole)), device)
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
        ways = {LESS, MORE}
        why = "it is time to look again"
        if self._changed:
            ways = {MORE if exchange_s > usual_s else LESS}
            why = f"the exchange takes {format_seconds(exchange_s)} a step, it took {format_seconds(usual_s)}"
        if self.current == (0 if ways == {LESS} else self._search.last) and len(ways) == 1:
            self.usual_s, self._strange = exchange_s, 0  # there is nothing to try
            return
        if self._comm.rank == 0:
            log.info("step %d: %s: candidates are tried again", self._step, why)
        self._look(ways)

    def _agreed(self, step: Timed, device: torch.device) -> Timed:
        """The shortest exchange and the longest step of all ranks."""
        given = torch.tensor((-step.exchange_s, step.whole_s, step.apart), dtype=torch.float64, device=device)
        exchange_s, whole_s, apart = self._comm.all_reduce(given, "max").tolist()
        return Timed(-exchange_s, whole_s, bool(apart))


def verdict(measured: Mapping[int, float], chosen: int, names: Sequence[str], gain: float) -> str:
    """What was decided, and why, in plain words.

    >>> verdict({0: 0.4, 2: 0.1, 1: 0.2}, 2, ["sum()", "sum(dtype='fp16')", "gather(sign())"], 0.05)
    'gather(sign()), at 100 ms a step, 4.0 times as fast as sum()'
    """
    step_s, least = measured[chosen], min(measured)
    kept = f"{names[chosen]}, at {format_seconds(step_s)} a step"
    if chosen > least:
        return f"{kept}, {measured[least] / step_s:.1f} times as fast as {names[least]}"
    if chosen:
        return f"{kept}, and no other that was tried pays"
    if len(measured) == 1:
        return f"{kept}, of which the exchange is a small part: this link needs no compression"
    return f"{kept}, and nothing saves {gain:.0%} of that for sure: this link needs no compression"
