"""One route of a method at work on its tensors: correct, reduce, settle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import ScaledShare, Sent
from laconic.comm.skippable import NonFiniteSum, largest_of, not_finite
from laconic.core.deferred import Write, check, deferred, late
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.mask import Mask, cleared
from laconic.core.turn import Turn
from laconic.exchange.method import Route
from laconic.feedback import BoundFeedback, Optimised
from laconic.reducers import BoundReducer
from laconic.reducers.dense_first import BoundDenseFirst
from laconic.reducers.sum import BoundSum


@dataclass(frozen=True)
class Bucket:
    """Flat gradient float32 (n,) that becomes `scale` times the mean.

    `waits`: whether the mean may be written in `end()`; until then `flat` may hold old feedback values.
    """

    flat: Tensor
    layout: Layout
    turn: Turn
    scale: float
    waits: bool
    writes: list[Write] = field(default_factory=list)

    def write_mean(self, *, skipped: bool = False) -> None:
        """Write the mean, or NaN."""
        if skipped:
            self.flat.fill_(math.nan)
            return
        with deferred():
            for write in self.writes:
                write()


@dataclass(frozen=True)
class BoundRoute:
    """Route bound to all of its tensors; a `part` is its tensors in a bucket."""

    name: str
    tensors: Layout
    feedback: BoundFeedback
    reducer: BoundReducer
    gain: float
    overlaps: bool
    memories: tuple[BoundFeedback | BoundReducer, ...]

    @classmethod
    def of(cls, route: Route, tensors: Layout, comm: Comm, optimised: Optimised) -> BoundRoute:
        """Bind a route, on all ranks. Raises `SpecError` if its feedback is unsafe for its reducer."""
        if (why := route.reducer.unaccountable) is not None and route.feedback.keeps_unsent:
            raise SpecError(f"{route.reducer!r} takes no {route.feedback!r}: {why}; use it without feedback")
        gain = route.feedback.gain(route.reducer.feedback_codec(), tensors)
        feedback = route.feedback.bind(tensors, optimised, comm.size)
        reducer = with_late_sums(route.reducer.bind_optimised(tensors, comm, optimised))
        memories: list[BoundFeedback | BoundReducer] = [feedback] if feedback.holds_back else []
        if reducer.remembers:
            memories.append(reducer)
        return cls(repr(route.reducer), tensors, feedback, reducer, gain, reducer.overlaps, tuple(memories))

    def correct(self, bucket: Bucket, part: Layout, scale: float) -> Tensor | None:
        return self.feedback.correct(bucket.flat, part, bucket.turn, scale, free=self.is_late(bucket))

    def begin(self, x: Tensor | None, part: Layout, bucket: Bucket) -> Callable[[], Sent | None]:
        """Start the reduction if it `overlaps`; return the call that ends it with the sent share.

        Every rank gets None if any rank has no finite `x`.
        """
        if self.overlaps:
            return self.reducer.begin(x, part, bucket.turn, bucket.flat, self.gain * bucket.scale)
        return partial(self._reduce, x, part, bucket)

    def _reduce(self, x: Tensor | None, part: Layout, bucket: Bucket) -> Sent | None:
        with late(self.is_late(bucket)) as writes:
            sent = self.reducer.reduce(x, part, bucket.turn, bucket.flat, self.gain * bucket.scale)
        bucket.writes.extend(writes)
        return sent

    def settle(self, sent: Sent, part: Layout, bucket: Bucket) -> None:
        share = sent if self.gain == 1 else ScaledShare(sent, self.gain)
        self.feedback.settle(share, part, bucket.turn)
        if not self.feedback.replaces_mean:
            return
        receive = partial(self.feedback.receive_, bucket.flat, part, bucket.turn, bucket.scale)
        if self.is_late(bucket):
            bucket.writes.append(receive)
        else:
            receive()

    def put_back(self, part: Layout) -> None:
        for each in self.memories:
            each.put_back(part)

    def accept(self, part: Layout) -> None:
        for each in self.memories:
            each.accept(part)

    def is_late(self, bucket: Bucket) -> bool:
        may_wait = bucket.waits and self.feedback.holds_back
        return may_wait and self._reducer_at(bucket.turn).writes_late(bucket.turn.step)

    def finite_is_unknown(self, turn: Turn) -> bool:
        return not (self.feedback.detects_non_finite or self._reducer_at(turn).detects_non_finite)

    def mean_is_unknown(self, bucket: Bucket) -> bool:
        return not (self.is_late(bucket) or self._reducer_at(bucket.turn).checks_mean)

    @property
    def holds_back(self) -> bool:
        return bool(len(self.tensors)) and (self.feedback.holds_back or self.reducer.holds_back)

    def discard(self) -> None:
        self.feedback.discard()
        self.reducer.discard()

    def remask(self, masks: Mapping[str, Mask]) -> None:
        self.reducer.remask(masks)
        state = cleared(self.feedback.state_dict(), masks)
        if state is not None:
            self.feedback.load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.feedback.state_dict(), **self.reducer.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own = self.reducer.state_dict().keys()
        self.feedback.load_state_dict({key: value for key, value in state.items() if key not in own})
        self.reducer.load_state_dict({key: value for key, value in state.items() if key in own})

    def _reducer_at(self, turn: Turn) -> BoundReducer:
        return self.reducer.at(turn.step) if isinstance(self.reducer, BoundDenseFirst) else self.reducer


Parts = tuple[tuple[BoundRoute, Layout], ...]


def parts_of(routes: Sequence[BoundRoute], bucket: Layout) -> Parts:
    parts = ((route, bucket.named(route.tensors.names)) for route in routes)
    return tuple((route, part) for route, part in parts if len(part))


def correct_all(parts: Parts, bucket: Bucket, scale: float) -> list[Tensor | None]:
    """Return the reducer's input of each route; None where it is not finite and the reducer cannot tell.

    On a GPU one non-finite input makes all unchecked ones None.
    """
    corrected = [route.correct(bucket, part, scale) for route, part in parts]
    unknown = [
        (i, x, part.segments)
        for i, ((route, part), x) in enumerate(zip(parts, corrected, strict=True))
        if x is not None and part.numel and route.finite_is_unknown(bucket.turn)
    ]
    if bucket.flat.is_cpu:
        finite = [kernels.all_finite(x, segments) for _, x, segments in unknown]
    else:
        finite = [_all_finite([(x, segments) for _, x, segments in unknown])] * len(unknown)
    for (i, _, _), fine in zip(unknown, finite, strict=True):
        if not fine:
            corrected[i] = None
    return corrected


def check_means(parts: Parts, bucket: Bucket) -> None:
    """Raise `NonFiniteSum` on all ranks if an unchecked mean is not finite.

    A GPU checks the whole bucket, later.
    """
    unknown = [part.segments.merged for route, part in parts if part.numel and route.mean_is_unknown(bucket)]
    if unknown and not bucket.flat.is_cpu:
        check(not_finite(*bucket.layout.segments.merged.views(bucket.flat)), lambda _: NonFiniteSum())
    elif not all(kernels.all_finite(bucket.flat, segments) for segments in unknown):
        raise NonFiniteSum


def first_not_finite(x: Tensor, layout: Layout) -> str | None:
    views = zip(layout.names, layout.segments.views(x), strict=True)
    return next((name for name, view in views if not bool(view.isfinite().all())), None)


def with_late_sums(reducer: BoundReducer) -> BoundReducer:
    if isinstance(reducer, BoundSum):
        return replace(reducer, late=True)
    if isinstance(reducer, BoundDenseFirst):
        return replace(reducer, dense=with_late_sums(reducer.dense), then=with_late_sums(reducer.then))
    return reducer


def _all_finite(parts: Sequence[tuple[Tensor, Segments]]) -> bool:
    if not parts:
        return True
    of: dict[int, tuple[Tensor, list[Segments]]] = {}
    for x, segments in parts:
        of.setdefault(id(x), (x, []))[1].append(segments)
    views = [view for x, some in of.values() for view in together(tuple(some)).views(x)]
    return math.isfinite(largest_of(views).item())


@lru_cache(maxsize=512)
def together(parts: tuple[Segments, ...]) -> Segments:
    """Return the ranges of all parts, in the fewest runs.

    >>> together((Segments((0, 5), (2, 1)), Segments((2,), (3,))))
    Segments(starts=(0,), sizes=(6,))
    """
    starts = tuple(start for part in parts for start in part.starts)
    sizes = tuple(size for part in parts for size in part.sizes)
    return Segments(starts, sizes).merged
