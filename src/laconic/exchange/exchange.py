"""Exchange: the life of a gradient, route by route: correct -> reduce -> settle.

It takes a flat bucket with its layout and leaves the mean there. If a gradient or a mean is not finite, all
ranks skip the step: the bucket gets NaN, and every memory is bit-identical to its value before the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.comm.metered import Metered
from laconic.comm.sent import Sent
from laconic.comm.void import VoidSum
from laconic.core.deferred import deferred
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout, PerLayout
from laconic.core.mask import MaskWatch, cleared
from laconic.core.turn import Turn
from laconic.exchange.clip import Clip
from laconic.exchange.method import Method
from laconic.exchange.noise_scale import NoiseMeter
from laconic.exchange.route import BoundRoute, Bucket, Parts, check_means, correct_all, first_not_finite
from laconic.exchange.sparse_gradients import sparse_mean
from laconic.exchange.state import check_shapes
from laconic.exchange.stopwatch import Seconds, Stopwatch
from laconic.feedback import Optimised
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers.sum import Sum


@outside_inference_mode("discard", "state_dict", "load_state_dict")
class Exchange:
    """A method bound to a model's layout and a group. `parameters`: those that may have masks, by name."""

    def __init__(
        self,
        method: Method,
        layout: Layout,
        comm: Metered,
        optimised: Optimised,
        seed: int = 0,
        seconds: Seconds | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.method = method
        self.layout = layout
        self.comm = comm
        self.seed = seed
        self.step = 0
        self.void: str | None = None  # why the present step is skipped
        self.seconds = seconds or Seconds()
        self.dense_bytes = 0
        whole = method.assign(layout)
        pairs = [*zip(method.routes, whole, strict=True)]
        self._routes = [BoundRoute.of(route, part, comm, optimised) for route, part in pairs]
        kept = (route.feedback for route, part in pairs if len(part))
        self._clipping = tuple(each for each in kept if each.clip_at(each.warm_at) is not None)
        self._clip = Clip(layout) if self._clipping else None
        self.noise = NoiseMeter(exactly_summed(method, layout), layout, comm.size)
        self._parts = PerLayout(partial(parts_of, self._routes))
        self._masks = MaskWatch(parameters or {})
        self.remembers = any(route.remembers for route in self._routes)  # whether a step changes a memory
        self._changed: list[tuple[BoundRoute, Layout]] = []  # in the present step
        self._unwritten: list[Bucket] = []  # buckets whose means are written at the end
        self._owned: dict[tuple[bool, ...], frozenset[str]] = {}

    def begin(self) -> None:
        """A new backward pass: its first bucket is about to come. All ranks begin it."""
        self._reset()
        masks = self._masks.changed()
        if masks is None:
            return
        for route in self._routes:
            route.reducer.remask(masks)
            kept = cleared(route.feedback.state_dict(), masks)
            if kept is not None:
                route.feedback.load_state_dict(kept)

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
        for route, part in self._changed:
            route.accept(part)
        self._changed.clear()
        waited = bool(self._unwritten)
        for bucket in self._unwritten:
            if self.void is not None:
                bucket.flat.fill_(torch.nan)
                continue
            with deferred():
                for write in bucket.writes:
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

    def _mean_(self, flat: Tensor, layout: Layout, scale: float, *, wait: bool) -> None:
        turn = Turn(self.step, self.comm.rank, self.seed)
        bucket = Bucket(flat, layout, turn, scale, waits=wait and flat.is_cpu)
        parts = self._parts(layout)
        given = self._clipped(flat, layout, 1 / scale)
        if measures := self.noise.due(self.step):
            self.noise.local(flat, layout, given)
        self._changed += parts
        shares: list[Sent] = []
        try:
            with deferred():  # flags on a GPU, such as those of damaged messages, are read in one copy
                inputs = correct_all(parts, bucket, given)
                suspect = None
                if any(x is None for x in inputs):
                    inputs, suspect = [None] * len(parts), first_not_finite(flat, layout)
                shares = self._reduce(parts, inputs, bucket, suspect)
                if self.void is None and self.remembers:
                    check_means(parts, bucket)
        except VoidSum:
            if self.void is None:
                self.cancel(first_not_finite(flat, layout) or "a tensor on another rank")
        if self.void is not None:
            return
        with deferred():
            for (route, part), sent in zip(parts, shares, strict=True):
                route.settle(sent, part, bucket)
        if measures:
            bucket.writes.append(partial(self.noise.mean, flat, layout, 1 / scale))
        if any(route.is_late(bucket) for route, _ in parts):
            self._unwritten.append(bucket)
        else:
            for write in bucket.writes:
                write()

    def _clipped(self, grad: Tensor, layout: Layout, scale: float) -> float:
        """The scale, times the factor that clips the gradient at this step."""
        if self._clip is None:
            return scale
        limits = [limit for each in self._clipping if (limit := each.clip_at(self.step)) is not None]
        limit = min(limits) / math.sqrt(self.comm.size) if limits else None
        return scale * self._clip.factor(grad, layout, scale, limit)

    def _reduce(
        self, parts: Parts, inputs: Sequence[Tensor | None], bucket: Bucket, suspect: str | None
    ) -> list[Sent]:
        """Reduce each route in place, and return its sent share; fewer if the step is skipped.

        Routes that can run in the background overlap with the others. The shares are passed to the feedback
        once all flags were read. `suspect`: the tensor that is not finite on this rank, if it is known.
        """
        ends, shares = [], []
        for (route, part), x in zip(parts, inputs, strict=True):
            with self.comm.phase(route.name):
                ends.append(route.begin(x, part, bucket))
        for (route, part), x, end in zip(parts, inputs, ends, strict=True):
            if end is None and self.void is not None:
                continue
            with self.comm.phase(route.name):
                sent = route.reduce(x, part, bucket) if end is None else end()
            if self.void is not None:
                continue
            if sent is None:
                at_fault = suspect or first_not_finite(bucket.flat, part)
                self.cancel(at_fault or "a tensor on another rank")
            else:
                shares.append(sent)
        return shares

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
        for route, part in self._changed:
            route.put_back(part)
        self._changed.clear()

    @property
    def holds_back(self) -> bool:
        """Whether a part of a gradient may be sent in a later step."""
        return any(route.holds_back for route in self._routes)

    def discard(self) -> None:
        """Forget all gradients so far, between steps: no part of them is sent later."""
        self._changed.clear()
        for route in self._routes:
            route.discard()

    def owns_momentum(self, step: int) -> frozenset[str]:
        """Names of the tensors whose momentum is applied before the exchange at this step."""
        owners = tuple(route.feedback.owns_momentum(step) for route in self.method.routes)
        if owners not in self._owned:
            owning = (route for route, owns in zip(self._routes, owners, strict=True) if owns)
            self._owned[owners] = frozenset(name for route in owning for name in route.tensors.names)
        return self._owned[owners]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of every route, "route<i>/<kind>/<tensor name>" to a tensor; norms to clip by."""
        self._put_back()  # a step that an error has interrupted
        norms = {} if self._clip is None else self._clip.state_dict()
        return norms | {
            f"route{i}/{key}": value
            for i, route in enumerate(self._routes)
            for key, value in route.state_dict().items()
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
        for i, route in enumerate(self._routes):
            prefix = f"route{i}/"
            route.load_state_dict(
                {key[len(prefix) :]: v for key, v in state.items() if key.startswith(prefix)}
            )
        self.step = step
        self._reset()


def parts_of(routes: Sequence[BoundRoute], bucket: Layout) -> Parts:
    """Return the routes that have tensors in a bucket, with these tensors."""
    parts = ((route, bucket.named(route.tensors.names)) for route in routes)
    return tuple((route, part) for route, part in parts if len(part))


def exactly_summed(method: Method, layout: Layout) -> Layout:
    """The tensors whose mean is that of the ranks' gradients, but for rounding to fp16."""
    parts = zip(method.routes, method.assign(layout), strict=True)
    exact: set[str] = set()
    for route, part in parts:
        if isinstance(route.reducer, Sum) and isinstance(route.feedback, NoFeedback):
            exact.update(part.names)
    return layout.named(exact)
