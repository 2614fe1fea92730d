"""Search: times candidates alternately with the present one, and returns the best.

Generators yield the next candidate and receive its timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator
from statistics import median
from typing import NamedTuple, TypeVar

from laconic.reducers.autotune.duel import FULL, QUICK, Answer, Looks, clear, decide

COLD, COUNTED = 2, 5  # uncounted first steps; steps per turn
LEADING = 3  # factor of the faster candidate's steps
FEW = 2  # steps of each for a clear difference
LONG_S, WAIT_S = 1.0, 10.0  # longer exchanges count at once; one step suffices
MISSES = 2  # consecutive failures that end the search
LESS, MORE = "less", "more"  # directions: towards less or more lossy candidates

T = TypeVar("T")


class Timed(NamedTuple):
    """Seconds of a step: in its exchange, and from its first bucket to the next step's.

    `uncounted`: a dense step also sent the residual.
    """

    exchange_s: float
    whole_s: float
    uncounted: bool = False


Trial = Generator[int, Timed, T]


class Search:
    """Measured steps by candidate.

    `gain`: share of a step that a lossier candidate must save; `last`: lossiest candidate allowed; `twice`:
    candidates that must save twice as much, because they send little of a gradient.
    """

    def __init__(self, gain: float, last: int, twice: Collection[int] = ()) -> None:
        self.gain, self.last, self._twice = gain, last, frozenset(twice)
        self._tried: defaultdict[int, list[Timed]] = defaultdict(list)
        self._answers: dict[tuple[int, int], bool] = {}  # final ones, by pair
        self._changed = False  # whether the link has changed
        self.warm: set[int] = set()

    def measured(self) -> dict[int, float]:
        return {each: median(self._seconds(each)) for each, steps in self._tried.items() if steps}

    def run(self, used: int, ways: Collection[str]) -> Trial[int]:
        """Search from the candidate in use; return the best. A first pass to lossier candidates is quick."""
        self._forget()
        self._changed = False
        best, rival, misses = used, used - 1, 0
        yield from self._turn(used, new=False)
        while LESS in ways and rival >= 0 and misses < MISSES:
            if (yield from self._pays(rival, used, rival, FULL)):
                misses += 1
            else:
                best, misses = rival, 0
            rival -= 1
        if best < used or MORE not in ways:
            return best
        best = yield from self._walk(best, QUICK)
        while (before := self._rival_before(best)) is not None:
            if (yield from self._pays(before, best, before, FULL)):
                break
            best = before
        return (yield from self._walk(best, FULL))

    def _walk(self, best: int, looks: Looks) -> Trial[int]:
        misses, sparse = 0, min((each for each in self._twice if each > best), default=None)
        for rival in range(best + 1, self.last + 1):
            if (misses >= MISSES and rival != sparse) or not self._exchanges(best):
                continue
            if (yield from self._pays(best, rival, rival, looks)):
                best, misses = rival, 0
            else:
                misses += 1
        return best

    def _rival_before(self, best: int) -> int | None:
        measured = {each: seconds for each, seconds in self.measured().items() if each < best}
        untimed = best - 1 if best and self._changed else None
        fastest = min(measured, key=lambda each: measured[each], default=untimed)
        return None if fastest is None or self._answers.get((fastest, best)) else fastest

    def _forget(self) -> None:
        self._tried.clear()
        self._answers.clear()

    def _pays(self, less: int, more: int, rival: int, looks: Looks) -> Trial[bool]:
        if (known := self._answers.get((less, more))) is not None:
            return known
        sparse = more in self._twice
        turn, tested, gain = rival, 0, min(1.0, self.gain * (2 if sparse else 1))
        unequal = looks is FULL and not (sparse and less == 0)  # dense steps after sparse are `uncounted`
        while True:
            leads = unequal and tested > COUNTED and self._leads(turn, less + more - turn)
            clearly = yield from self._turn(turn, less, more, count=LEADING * COUNTED if leads else COUNTED)
            if self._has_changed(turn):
                self._forget()
                self._changed, tested, turn = True, 0, less + more - turn
                continue
            pair = self._seconds(less), self._seconds(more)
            answer = decide(*pair, gain, looks, tested=tested) if clearly is None else Answer(clearly, True)
            if answer is not None:
                if answer.sure or looks is FULL:
                    self._answers[less, more] = answer.pays
                return answer.pays
            tested, turn = min(map(len, pair)), less + more - turn

    def _turn(self, candidate: int, *pair: int, new: bool = True, count: int = COUNTED) -> Trial[bool | None]:
        """Time a candidate for `count` steps; return an early answer if one of a pair is clearly faster."""
        steps, counted = self._tried[candidate], 0
        cold = new if candidate in self.warm else COLD
        self.warm.add(candidate)
        while counted < count:
            step = yield candidate
            cold -= 1
            if step.uncounted or (cold >= 0 and step.exchange_s <= LONG_S):
                continue
            steps.append(step)
            counted += 1
            if counted % COUNTED == 0 and self._has_changed(candidate):
                break
            if pair and all(map(self._enough, pair)):
                answer = clear(*map(self._seconds, pair))
                if answer is not None:
                    return answer
            if not pair and self._enough(candidate):
                break
        return None

    def _has_changed(self, candidate: int) -> bool:
        seconds = self._seconds(candidate)
        return len(seconds) > COUNTED and clear(seconds[:COUNTED], seconds[-COUNTED:]) is not None

    def _leads(self, candidate: int, other: int) -> bool:
        return median(self._seconds(candidate)) < median(self._seconds(other))

    def _enough(self, candidate: int) -> bool:
        steps = self._tried[candidate]
        return len(steps) >= FEW or any(step.exchange_s > WAIT_S for step in steps)

    def _seconds(self, candidate: int) -> list[float]:
        return [step.whole_s for step in self._tried[candidate]]

    def _exchanges(self, candidate: int) -> bool:
        steps = self._tried[candidate]
        return median(step.exchange_s for step in steps) > self.gain * median(self._seconds(candidate))
