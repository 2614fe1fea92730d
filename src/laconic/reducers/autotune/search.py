"""Search: times candidates alternately with the present one, and returns the best.

Generators advance with each training step: they yield the candidate to use next and receive its timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator
from statistics import median
from typing import NamedTuple, TypeVar

from laconic.reducers.autotune.duel import clear, pays

COLD, COUNTED = 2, 5  # uncounted first steps of a candidate, and counted steps per turn
FEW = 2  # steps of each that suffice if one is clearly faster
LONG_S, WAIT_S = 1.0, 10.0  # exchanges: longer ones count at once; one step suffices
MISSES = 2  # consecutive failures that end the search
LESS, MORE = "less", "more"  # directions of the search: towards less or more loss

T = TypeVar("T")


class Timed(NamedTuple):
    """Seconds of a step: in its exchange, and from its first bucket to that of the next step.

    `apart`: does not count, because a dense step also sent the residual.
    """

    exchange_s: float
    whole_s: float
    apart: bool = False


Trial = Generator[int, Timed, T]


class Search:
    """Measured steps by candidate.

    Args:
        gain: Share of a step that a lossier candidate must save.
        last: Lossiest candidate that may be used.
        twice: Candidates that must save twice as much, because they send only a small part of a gradient.
    """

    def __init__(self, gain: float, last: int, twice: Collection[int] = ()) -> None:
        self.gain, self.last, self._twice = gain, last, frozenset(twice)
        self._tried: defaultdict[int, list[Timed]] = defaultdict(list)  # of this search
        self.warm: set[int] = set()

    def measured(self) -> dict[int, float]:
        return {each: median(self._seconds(each)) for each, steps in self._tried.items() if steps}

    def run(self, used: int, ways: Collection[str]) -> Trial[int]:
        """Search from the candidate in use; return the best."""
        self._tried.clear()
        kept, rival, missed = used, used - 1, 0
        yield from self._turn(used, new=False)
        while LESS in ways and rival >= 0 and missed < MISSES:
            if (yield from self._pays(rival, used, rival)):
                missed += 1
            else:
                kept, missed = rival, 0
            rival -= 1
        if kept < used:
            return kept
        rival, missed = used + 1, 0
        while MORE in ways and rival <= self.last and missed < MISSES and self._exchanges(kept):
            if (yield from self._pays(kept, rival, rival)):
                kept, missed = rival, 0
            else:
                missed += 1
            rival += 1
        return kept

    def _pays(self, less: int, more: int, rival: int) -> Trial[bool]:
        """Return whether the lossier of two pays. They alternate, starting with the untimed rival."""
        turn, gain = rival, min(1.0, self.gain * (2 if more in self._twice else 1))
        while True:
            answer = yield from self._turn(turn, less, more)
            if answer is None:
                answer = pays(self._seconds(less), self._seconds(more), gain)
            if answer is not None:
                return answer
            seconds = self._seconds(turn)
            if len(seconds) > COUNTED and clear(seconds[:COUNTED], seconds[-COUNTED:]) is not None:
                self._tried[less].clear()  # the link has changed
                self._tried[more].clear()
            turn = less + more - turn

    def _turn(self, candidate: int, *pair: int, new: bool = True) -> Trial[bool | None]:
        """Time a candidate for COUNTED steps; return an early answer if one of a pair is clearly faster."""
        steps, counted = self._tried[candidate], 0
        cold = new if candidate in self.warm else COLD
        self.warm.add(candidate)
        while counted < COUNTED:
            step = yield candidate
            cold -= 1
            if step.apart or (cold >= 0 and step.exchange_s <= LONG_S):
                continue
            steps.append(step)
            counted += 1
            if pair and all(map(self._enough, pair)):
                answer = clear(*map(self._seconds, pair))
                if answer is not None:
                    return answer
            if not pair and self._enough(candidate):
                break
        return None

    def _enough(self, candidate: int) -> bool:
        steps = self._tried[candidate]
        return len(steps) >= FEW or any(step.exchange_s > WAIT_S for step in steps)

    def _seconds(self, candidate: int) -> list[float]:
        return [step.whole_s for step in self._tried[candidate]]

    def _exchanges(self, candidate: int) -> bool:
        """Return whether the candidate's exchange takes more of a step than must be saved."""
        steps = self._tried[candidate]
        return median(step.exchange_s for step in steps) > self.gain * median(self._seconds(candidate))
