"""A route bound to its tensors: feedback and reducer, and the reduction of one bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from laconic.comm.sent import Sent
from laconic.core.errors import SpecError
from laconic.core.late import Write, late
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.method import Route
from laconic.feedback import BoundFeedback
from laconic.reducers import BoundReducer
from laconic.reducers.dense_first import BoundDenseFirst
from laconic.reducers.sum import BoundSum


@dataclass(frozen=True)
class Leg:
    """One route bound to all of its tensors."""

    name: str
    feedback: BoundFeedback
    reducer: BoundReducer
    gain: float

    def finite_is_unknown(self, step: int) -> bool:
        """Return whether neither the feedback nor the reducer looks for NaN and Inf at this step."""
        return not (self.feedback.detects_non_finite or self._reducer_at(step).detects_non_finite)

    def checks_mean(self, step: int) -> bool:
        """Return whether the reducer has found out by itself in this step whether the mean is finite."""
        return self._reducer_at(step).checks_mean

    def writes_late(self, step: int) -> bool:
        """Return whether means can be written at the end of this step."""
        return self.feedback.holds_back and self._reducer_at(step).writes_late(step)

    @property
    def remembers(self) -> bool:
        """Whether a step changes a memory of it."""
        return self.feedback.holds_back or self.reducer.remembers

    def _reducer_at(self, step: int) -> BoundReducer:
        return self.reducer.at(step) if isinstance(self.reducer, BoundDenseFirst) else self.reducer

    def settle(self, sent: Sent, part: Layout, turn: Turn) -> None:
        """Pass the sent share, times the gain, to the feedback."""
        self.feedback.settle(sent if self.gain == 1 else Scaled(sent, self.gain), part, turn)


@dataclass(frozen=True)
class Reduction:
    """Reduction of one leg's part of a bucket; `x` is None if this rank's gradient is not finite.

    `late`: the mean is written by calling `writes`, and nothing before may write to `out`.
    """

    leg: Leg
    part: Layout
    x: Tensor | None
    turn: Turn
    out: Tensor
    alpha: float
    late: bool = False
    writes: list[Write] = field(default_factory=list)

    def begin(self) -> Callable[[], Sent | None] | None:
        """Start the reduction if it can run in the background, and return the call that ends it."""
        return self.leg.reducer.begin(self.x, self.part, self.turn, self.out, self.alpha)

    def reduce(self) -> Sent | None:
        """Reduce, and return the sent share."""
        with late(self.late) as writes:
            sent = self.leg.reducer.reduce(self.x, self.part, self.turn, self.out, self.alpha)
        self.writes.extend(writes)
        return sent

    def settle(self, sent: Sent) -> None:
        """Pass the sent share to the feedback, and let it correct the mean for the optimizer."""
        leg = self.leg
        leg.settle(sent, self.part, self.turn)
        receive = partial(leg.feedback.receive_, self.out, self.part, self.turn, self.alpha / leg.gain)
        if self.late:
            self.writes.append(receive)
        else:
            receive()


@dataclass(frozen=True)
class Scaled:
    """A share times a gain: the sent share of damped feedback."""

    share: Sent
    gain: float

    def subtract_from_(self, x: Tensor) -> Tensor:
        """x -= gain * share, in place."""
        return self.share.add_to_(x, -self.gain)

    def clear_(self, memory: Tensor) -> Tensor:
        """Set to zero the entries of memory that were sent."""
        return self.share.clear_(memory)


def checked_late(reducer: BoundReducer) -> BoundReducer:
    """Return the reducer with its sums checked by `deferred.check`."""
    if isinstance(reducer, BoundSum):
        return replace(reducer, late=True)
    if isinstance(reducer, BoundDenseFirst):
        return replace(reducer, dense=checked_late(reducer.dense), then=checked_late(reducer.then))
    return reducer


def gain_of(route: Route, layout: Layout) -> float:
    """Return the factor on a route's mean. Raises `SpecError` if its feedback is not safe."""
    why = route.reducer.unaccountable
    if why is not None and route.feedback.keeps_unsent:
        raise SpecError(f"{route.reducer!r} takes no {route.feedback!r}: {why}; use it without feedback")
    return route.feedback.gain(route.reducer.feedback_codec(), layout)
