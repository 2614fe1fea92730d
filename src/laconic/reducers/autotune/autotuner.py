"""Autotuner: selects the candidate to use by timing candidates alternately.

    1. Training starts with the lossless candidate. The next lossier one alternates with it, COUNTED steps
       each, until it is clear whether it saves `gain` of a step (`duel`).
    2. This ends after MISSES consecutive candidates that do not pay (the first sparse one is still tried),
       or if an exchange takes at most `gain` of a step. A second pass repeats unclear pairs. A tie keeps the
       less lossy candidate.
    3. Not counted: the first COLD steps of each candidate, the first after each change, and dense steps that
       also send the residual.
    4. Every WINDOW steps the least exchange time, robust to load, is compared with the first window's. A
       change by CHANGED times, and by MATTERS of the step, in `patience` consecutive windows starts a search:
       among lossier candidates if the exchange is longer, among less lossy ones if it is shorter. After
       `every` steps one starts in both directions. The patience doubles if the candidate stays.

Whole steps are compared, because the exchange competes with backward for cores. All ranks decide from the
slowest rank's step and the shortest exchange: the others wait for that rank.
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

WINDOW = 6  # steps between two checks
CHANGED, MATTERS = 1.5, 0.1  # ratio, and share of the step, of a new link
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
)  # state that an observation changes, except the window's seconds and the search (saved separately)
PATIENCE, MAX_PATIENCE = 2, 16  # windows

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class Look:
    used: int
    ways: Collection[str]
    warm: frozenset[int]
    timed: tuple[Timed, ...] = ()


class Autotuner:
    """Search state on one rank; equal on all.

    `names`: the candidates, the lossless one first; `every`: steps between searches on a constant link;
    `pinned`: candidate to use without a search.
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
        self.current = pinned or 0
        self.chosen = pinned
        self.usual_s = 0.0  # of the chosen one's exchange; 0 if unknown
        self.windows = 0  # since the last search
        self._names, self._comm, self._search, self._every, self._clock = names, comm, search, every, clock
        self._fixed = pinned is not None or search.last == 0
        self._step = -2
        self._began: float | None = None  # when this step began, unless skipped
        self._exchange_s = 0.0
        self._uncounted = False
        self._steps: list[Timed] = []  # of the window
        self._strange = 0  # consecutive windows with a change
        self._patience = PATIENCE
        self._changed = False
        self._trial: Trial[int] | None = None
        self._looked: Look | None = None
        self._before: dict[str, Any] | None = None  # before this step's first bucket
        self._look({MORE})

    @property
    def times(self) -> bool:
        return not self._fixed

    @property
    def searching(self) -> bool:
        return self._trial is not None and not self._fixed

    def limit(self, last: int) -> None:
        """Use no lossier candidate than `last` from the next step on; end a search where it began."""
        self._search.last = last
        self.resume(min(self.current if self._looked is None else self._looked.used, last), 0.0)

    def resume(self, chosen: int, usual_s: float) -> None:
        if self._fixed:
            return
        self.current = self.chosen = min(chosen, self._search.last)
        self.usual_s = usual_s if self.chosen == chosen else 0.0
        self._trial = self._looked = self._before = None
        self._steps.clear()

    def begin(self, step: int, device: torch.device) -> None:
        """Start a bucket, on all ranks; a step's first one evaluates the last step."""
        if step == self._step or self._fixed:
            return
        self._before = None
        now, began, follows = self._clock(), self._began, step == self._step + 1
        self._step, self._began = step, None
        if began is None or not follows:
            return
        timed = Timed(self._exchange_s, now - began, self._uncounted)
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

    def note(self, entered: float, left: float, uncounted: bool = False) -> None:
        if self._began is None:
            self._began, self._exchange_s, self._uncounted = entered, 0.0, False
        self._exchange_s += left - entered
        self._uncounted |= uncounted

    def put_back(self) -> None:
        self._began = None
        if self._before is None:
            return
        before, self._before = self._before, None
        self._search.warm = set(before.pop("warm"))
        self.__dict__.update(before)
        if self._looked is not None:  # a generator cannot be copied: replay it
            self._search.warm = set(self._looked.warm)
            self._trial = self._search.run(self._looked.used, self._looked.ways)
            self.current = next(self._trial)
            for each in self._looked.timed:
                self.current = self._trial.send(each)

    def accept(self) -> None:
        self._before = None

    def _look(self, ways: Collection[str]) -> None:
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
        why = "the regular search is due"
        if self._changed:
            ways = {MORE if exchange_s > usual_s else LESS}
            why = f"the exchange takes {format_seconds(exchange_s)} a step, earlier {format_seconds(usual_s)}"
        if self.current == (0 if ways == {LESS} else self._search.last) and len(ways) == 1:
            self.usual_s, self._strange = exchange_s, 0  # nothing to try
            return
        if self._comm.rank == 0:
            log.info("step %d: %s: searching again", self._step, why)
        self._look(ways)

    def _agreed(self, step: Timed, device: torch.device) -> Timed:
        given = torch.tensor(
            (-step.exchange_s, step.whole_s, step.uncounted), dtype=torch.float64, device=device
        )
        exchange_s, whole_s, uncounted = self._comm.all_reduce(given, "max").tolist()
        return Timed(-exchange_s, whole_s, bool(uncounted))


def verdict(measured: Mapping[int, float], chosen: int, names: Sequence[str], gain: float) -> str:
    """Return the decision and its reason as text.

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
