"""Exchange: the life of a gradient, route by route: correct -> reduce -> settle.

It takes a flat bucket with its layout and leaves the mean there. If a gradient or a mean is not finite, all
ranks skip the step: the bucket gets NaN, and every memory is bit-identical to its value before the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.comm.metered import Metered
from laconic.comm.sent import Sent
from laconic.comm.void import VoidSum
from laconic.core.deferred import deferred
from laconic.core.inference import outside_inference_mode
from laconic.core.late import Write
from laconic.core.layout import Layout
from laconic.core.mask import Mask, cleared
from laconic.core.per_layout import PerLayout
from laconic.core.turn import Turn
from laconic.exchange.clip import Clip
from laconic.exchange.finite import check_means, corrected_by, first_not_finite
from laconic.exchange.leg import Leg, Reduction, checked_late, gain_of
from laconic.exchange.masks import MaskWatch
from laconic.exchange.method import Method
from laconic.exchange.noise_scale import NoiseMeter
from laconic.exchange.sparse_gradients import sparse_mean
from laconic.exchange.state import check_shapes
from laconic.exchange.stats import Seconds
from laconic.exchange.stopwatch import Stopwatch
from laconic.feedback import Optimised
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers.sum import Sum


@outside_inference_mode("discard", "state_dict", "load_state_dict")
class Exchange:
    """A method bound to a model's layout and a group."""

    def __init__(
        self,
        method: Method,
        layout: Layout,
        comm: Metered,
        optimised: Optimised,
        seed: int = 0,
        seconds: Seconds | None = None,
        mask_of: Callable[[str], Mask | None] = lambda name: None,
    ) -> None:
        self.method = method
        self.layout = layout
        self.comm = comm
        self.seed = seed
        self.step = 0
        self.void: str | None = None  # why the present step is skipped
        self.seconds = seconds or Seconds()
        self.dense_bytes = 0
        self._legs: list[Leg] = []
        self._whole = whole = method.assign(layout)
        for route, part in zip(method.routes, whole, strict=True):
            gain = gain_of(route, part)
            feedback = route.feedback.bind(part, optimised, comm.size)
            reducer = checked_late(route.reducer.bind(part, comm))
            self._legs.append(Leg(repr(route.reducer), feedback, reducer, gain))
        kept = (route.feedback for route, part in zip(method.routes, whole, strict=True) if len(part))
        self._clipping = tuple(each for each in kept if each.clip_at(each.warm_at) is not None)
        self._clip = Clip(layout) if self._clipping else None
        self.noise = NoiseMeter(exactly_summed(method, layout), layout, comm.size)
        self._parts = PerLayout(partial(assigned, self._legs, whole))
        self.masks = MaskWatch(layout.names, mask_of)
        self.remembers = any(leg.remembers for leg in self._legs)  # whether a step changes a memory
        self._changed: list[tuple[Leg, Layout]] = []  # in the present step
        self._unwritten: list[tuple[Tensor, list[Write]]] = []  # buckets whose means are written at the end
        self._owned: dict[tuple[bool, ...], frozenset[str]] = {}

    def begin(self) -> None:
        """A new backward pass: its first bucket is about to come. All ranks begin it."""
        self._reset()
        masks = self.masks.changed()
        if masks is None:
            return
        for leg in self._legs:
            leg.reducer.remask(masks)
            kept = cleared(leg.feedback.state_dict(), masks)
            if kept is not None:
                leg.feedback.load_state_dict(kept)

    def _reset(self) -> None:
        self.void = None
        self._put_back()  # of a step that ended with an error
        self._unwritten.clear()
        self.noise.begin()
        if self._clip is not None:
            self._clip.begin()

    def end(self) -> None:
        """The last bucket of this backward pass is done: write the means that were to wait for it."""
        began = time.perf_counter()
        for leg, part in self._changed:
            leg.feedback.accept(part)
            leg.reducer.accept(part)
        self._changed.clear()
        waited = bool(self._unwritten)
        for bucket, writes in self._unwritten:
            if self.void is not None:
                bucket.fill_(torch.nan)
                continue
            with deferred():
                for write in writes:
                    write()
        self._unwritten.clear()
        self.seconds.decode_s += time.perf_counter() - began if waited else 0.0
        if self._clip is not None and self.void is None:
            self._clip.end()
        if self.void is None and self.noise.due(self.step):
            self.noise.end()
        self.step += 1

    def mean_(self, bucket: Tensor, layout: Layout, scale: float = 1.0, *, wait: bool = False) -> bool:
        """bucket float32 (n,) becomes the group's mean; or NaN, and False, where the step is skipped.

        The gradients are multiplied by 1 / `scale` before the feedback, and clipped where it asks for that;
        the mean is multiplied by `scale` after it. `wait`: the mean is there after `end()` only, so that the
        bucket can hold values of a memory until then.
        """
        watch = Stopwatch(self.seconds, self.comm, bucket.device, self.step)
        if self.void is None:
            self._mean_(bucket, layout, scale, wait=wait)
        if self.void is not None:
            bucket.fill_(torch.nan)
        watch.stop()
        self.dense_bytes += self.comm.dense_sent(4 * layout.numel)
        return self.void is None

    def _mean_(self, bucket: Tensor, layout: Layout, scale: float, *, wait: bool) -> None:
        turn = Turn(self.step, self.comm.rank, self.seed)
        legs = self._parts(layout)
        given = self._clipped(bucket, layout, 1 / scale)
        if measures := self.noise.due(self.step):
            self.noise.local(bucket, layout, given)
        done: list[tuple[Reduction, Sent]] = []
        free = [wait and bucket.is_cpu and leg.writes_late(self.step) for leg, _ in legs]
        self._changed += legs
        try:
            with deferred():  # flags on a GPU, such as those of damaged messages, are read in one copy
                corrected = corrected_by(legs, bucket, turn, given, free)
                finite = all(x is not None for x in corrected)
                suspect = None if finite else first_not_finite(bucket, layout)
                reductions = [
                    Reduction(leg, part, x if finite else None, turn, bucket, leg.gain * scale, late=each)
                    for (leg, part), x, each in zip(legs, corrected, free, strict=True)
                ]
                self._reduce(reductions, suspect, done)
                if self.void is None and self.remembers:
                    check_means(reductions, layout)
        except VoidSum:
            if self.void is None:
                self.cancel(first_not_finite(bucket, layout) or "a tensor on another rank")
        if self.void is not None:
            return
        with deferred():
            for reduction, sent in done:
                reduction.settle(sent)
        writes = [write for reduction in reductions for write in reduction.writes]
        if measures:
            writes.append(partial(self.noise.mean, bucket, layout, 1 / scale))
        if any(free):
            self._unwritten.append((bucket, writes))
        else:
            for write in writes:
                write()

    def _clipped(self, grad: Tensor, layout: Layout, scale: float) -> float:
        """The scale, times the factor that clips the gradient at this step."""
        if self._clip is None:
            return scale
        limits = [limit for each in self._clipping if (limit := each.clip_at(self.step)) is not None]
        limit = min(limits) / math.sqrt(self.comm.size) if limits else None
        return scale * self._clip.factor(grad, layout, scale, limit)

    def _reduce(
        self, reductions: Sequence[Reduction], suspect: str | None, done: list[tuple[Reduction, Sent]]
    ) -> None:
        """Reduce each leg in place; legs that can run in the background overlap with the others.

        Add the sent share of each leg to `done`; it is passed to the feedback once all flags were read.
        """
        ends = []
        for reduction in reductions:
            with self.comm.phase(reduction.leg.name):
                ends.append(reduction.begin())
        for reduction, end in zip(reductions, ends, strict=True):
            if end is None and self.void is not None:
                continue
            with self.comm.phase(reduction.leg.name):
                sent = reduction.reduce() if end is None else end()
            if self.void is not None:
                continue
            if sent is None:
                at_fault = suspect or first_not_finite(reduction.out, reduction.part)
                self.cancel(at_fault or "a tensor on another rank")
            else:
                done.append((reduction, sent))

    def sparse_mean(self, grad: Tensor) -> Tensor:
        """Return the mean over ranks of sparse COO `grad`, gathered unchanged; NaN if the step is skipped."""
        watch = Stopwatch(self.seconds, self.comm, grad.device, self.step)
        with self.comm.phase("sparse gradients"):
            before = self.comm.snapshot().network_sent
            mean = sparse_mean(grad, self.comm)
        if self.void is None and not bool(mean.values().isfinite().all()):
            self.cancel("a sparse gradient")
        if self.void is not None:
            mean.values().fill_(torch.nan)
        watch.stop()
        self.dense_bytes += self.comm.snapshot().network_sent - before  # DDP gathers them too
        return mean

    def cancel(self, reason: str) -> None:
        """Skip this step: every memory is again as before it. All ranks call it. `reason`: the bad tensor."""
        self.void = reason
        self._put_back()

    def _put_back(self) -> None:
        for leg, part in self._changed:
            leg.feedback.put_back(part)
            leg.reducer.put_back(part)
        self._changed.clear()

    @property
    def holds_back(self) -> bool:
        """Whether a part of a gradient may be sent in a later step."""
        legs = zip(self._legs, self._whole, strict=True)
        return any(len(part) and (leg.feedback.holds_back or leg.reducer.holds_back) for leg, part in legs)

    def discard(self) -> None:
        """Forget all gradients so far, between steps: no part of them is sent later."""
        self._changed.clear()
        for leg in self._legs:
            leg.feedback.discard()
            leg.reducer.discard()

    def owns_momentum(self, step: int) -> frozenset[str]:
        """Names of the tensors whose momentum is applied before the exchange at this step."""
        owners = tuple(route.feedback.owns_momentum(step) for route in self.method.routes)
        if owners not in self._owned:
            parts = (part for part, owns in zip(self._whole, owners, strict=True) if owns)
            self._owned[owners] = frozenset(name for part in parts for name in part.names)
        return self._owned[owners]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of every route, "route<i>/<kind>/<tensor name>" to a tensor; norms to clip by."""
        self._put_back()  # a step that an error has interrupted
        norms = {} if self._clip is None else self._clip.state_dict()
        return norms | {
            f"route{i}/{key}": value
            for i, leg in enumerate(self._legs)
            for key, value in {**leg.feedback.state_dict(), **leg.reducer.state_dict()}.items()
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `StateError` unless the state has exactly the tensors of this method's memory."""
        check_shapes(self.state_dict(), state, "method")

    def load_state_dict(self, state: Mapping[str, Tensor], step: int) -> None:
        """Take memory and step count back. Raises `StateError`, with nothing changed, if a tensor differs."""
        self._put_back()
        self.check_state(state)
        if self._clip is not None:
            self._clip.load_state_dict(state)
        for i, leg in enumerate(self._legs):
            prefix = f"route{i}/"
            part = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
            reduced = leg.reducer.state_dict().keys()
            leg.feedback.load_state_dict({key: value for key, value in part.items() if key not in reduced})
            leg.reducer.load_state_dict({key: value for key, value in part.items() if key in reduced})
        self.step = step
        self._reset()


def assigned(legs: Sequence[Leg], whole: Sequence[Layout], bucket: Layout) -> tuple[tuple[Leg, Layout], ...]:
    """Return the legs that have tensors in a bucket, with these tensors."""
    parts = (bucket.named(part.names) for part in whole)
    return tuple((leg, part) for leg, part in zip(legs, parts, strict=True) if len(part))


def exactly_summed(method: Method, layout: Layout) -> Layout:
    """The tensors whose mean is that of the ranks' gradients, but for rounding to fp16."""
    parts = zip(method.routes, method.assign(layout), strict=True)
    exact: set[str] = set()
    for route, part in parts:
        if isinstance(route.reducer, Sum) and isinstance(route.feedback, NoFeedback):
            exact.update(part.names)
    return layout.named(exact)
