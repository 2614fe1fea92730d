"""Attached: a method in use on a model and a group.

It replaces a flat bucket by the mean: correct -> reduce -> settle, route by route. If a gradient or a mean
is not finite, all ranks skip the step: the bucket gets NaN, every memory is restored bit for bit, and the
optimiser refuses the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.comm.joint_calls import Exchanging, unwatched
from laconic.comm.messages import Sent
from laconic.comm.metered import Metered
from laconic.comm.skippable import NonFiniteSum
from laconic.core.deferred import deferred
from laconic.core.errors import NonFiniteError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout, PerLayout
from laconic.core.mask import MaskWatch
from laconic.core.turn import Turn
from laconic.exchange.bound_rules import BoundRules
from laconic.exchange.clip import Clip
from laconic.exchange.held_by import limited
from laconic.exchange.local_momentum import LocalMomentum, adapted
from laconic.exchange.method import Method
from laconic.exchange.noise_scale import NoiseMeter, exactly_summed
from laconic.exchange.route import (
    BoundRoute,
    Bucket,
    Parts,
    check_means,
    correct_all,
    first_not_finite,
    parts_of,
)
from laconic.exchange.rule import Observer, OptimiserSide, OptimiserView, RuleContext
from laconic.exchange.sparse_gradients import sparse_mean
from laconic.exchange.state import check_shapes, under, without
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds, Stopwatch


@outside_inference_mode("discard", "state_dict", "load_state_dict")
class Attached:
    """Method in use; all ranks create one. `exchanging`: context around each exchange, by its name."""

    def __init__(
        self,
        method: Method,
        layout: Layout,
        comm: Metered,
        optimisers: OptimiserSide,
        seed: int = 0,
        seconds: Seconds | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        exchanging: Exchanging = unwatched,
    ) -> None:
        self.method = method = limited(method, layout, optimisers)
        self.layout, self.comm, self.seed = layout, comm, seed
        self.step = 0  # backward passes
        self.skip_reason: str | None = None
        self.checks: list[Callable[[], None]] = []
        self.observers: list[Observer] = []  # called before each optimiser step, after `checks`
        self.seconds = seconds or Seconds()
        self.dense_bytes = 0
        pairs = [*zip(method.routes, method.assign(layout), strict=True)]
        self.momentum = LocalMomentum(pairs, optimisers, comm)
        self._routes = [BoundRoute.of(route, part, comm, self.momentum) for route, part in pairs]
        self.momentum.bound = [(route.feedback, route.reducer) for route in self._routes]
        self._clip = Clip.of([route.feedback for route, part in pairs if len(part)], layout, comm.size)
        self.noise = NoiseMeter(exactly_summed(method, layout), layout, comm.size)
        self._parts = PerLayout(partial(parts_of, self._routes))
        self._masks = MaskWatch(parameters or {})
        self._exchanging = exchanging
        self.remembers = any(route.memories for route in self._routes)
        self._changed: list[tuple[BoundRoute, Layout]] = []
        self._unwritten: list[Bucket] = []
        context = RuleContext(comm, seed, self.seconds)
        self.rules = BoundRules(method, layout, optimisers, context, parameters or {}, exchanging)
        optimisers.before_steps(self.before_step)

    def begin(self, agree_on: torch.device | None = None) -> None:
        self._reset()
        with self._exchanging(f"the exchange of step {self.step}"):  # if momentum goes back to SGD
            if agree_on is not None:
                self.momentum.agree(agree_on)
            self.momentum.begin()
        if (masks := self._masks.changed()) is not None:
            self.momentum.remask(masks)
            for route in self._routes:
                route.remask(masks)

    def _reset(self) -> None:
        self.skip_reason = None
        self._put_back()
        self._unwritten.clear()
        self.noise.begin()
        if self._clip is not None:
            self._clip.begin()

    def end(self) -> None:
        began = time.perf_counter()
        for route, part in self._changed:
            route.accept(part)
        self._changed.clear()
        for bucket in self._unwritten:
            bucket.write_mean(skipped=self.skip_reason is not None)
        self.seconds.decode_s += time.perf_counter() - began if self._unwritten else 0.0
        self._unwritten.clear()
        if self._clip is not None and self.skip_reason is None:
            self._clip.end()
        if self.skip_reason is None:
            self.momentum.end(self.step)
            if self.noise.due(self.step):
                self.noise.end()
        self.step += 1

    def mean_(self, bucket: Tensor, layout: Layout, scale: float = 1.0, *, wait: bool = False) -> bool:
        """Replace bucket float32 (n,) by the group's mean; by NaN, and return False, in a skipped step.

        Gradients are divided by `scale` before feedback and clipping, the mean is multiplied by it. `wait`:
        write it in `end()`.
        """
        watch = Stopwatch(self.seconds, self.comm, bucket.device, self.step)
        try:
            with self._exchanging(f"the exchange of step {self.step}"):
                if self.skip_reason is None:
                    self._mean_(bucket, layout, scale, wait=wait)
        except BaseException:
            self._put_back()  # at once: a script may reuse the buckets
            raise
        if self.skip_reason is not None:
            bucket.fill_(torch.nan)
        watch.stop()
        self.dense_bytes += self.comm.dense_sent(4 * layout.numel)
        return self.skip_reason is None

    def _mean_(self, flat: Tensor, layout: Layout, scale: float, *, wait: bool) -> None:
        turn = Turn(self.step, self.comm.rank, self.seed)
        bucket = Bucket(flat, layout, turn, scale, waits=wait and flat.is_cpu)
        parts = self._parts(layout)
        given = 1 / scale
        if self._clip is not None:
            given *= self._clip.factor(flat, layout, given, self.step)
        if measures := self.noise.due(self.step):
            self.noise.local(flat, layout, given)
        self._changed += parts
        shares: list[Sent] = []
        try:
            with deferred():  # flags on a GPU are read in one copy
                inputs = correct_all(parts, bucket, given)
                suspect = None
                if any(x is None for x in inputs):
                    inputs, suspect = [None] * len(parts), first_not_finite(flat, layout)
                shares = self._reduce(parts, inputs, bucket, suspect)
                if self.skip_reason is None and self.remembers:
                    check_means(parts, bucket)
        except NonFiniteSum:
            if self.skip_reason is None:
                self.cancel(first_not_finite(flat, layout) or "a tensor on another rank")
        if self.skip_reason is not None:
            return
        with deferred():
            for (route, part), sent in zip(parts, shares, strict=True):
                route.settle(sent, part, bucket)
        if measures:
            bucket.writes.append(partial(self.noise.mean, flat, layout, 1 / scale))
        if any(route.is_late(bucket) for route, _ in parts):
            self._unwritten.append(bucket)
        else:
            bucket.write_mean()

    def _reduce(
        self, parts: Parts, inputs: Sequence[Tensor | None], bucket: Bucket, suspect: str | None
    ) -> list[Sent]:
        """Reduce each route in place, and return its sent share; fewer if the step is skipped."""
        ends, shares = [], []
        for (route, part), x in zip(parts, inputs, strict=True):
            with self.comm.phase(route.name):
                ends.append(route.begin(x, part, bucket))
        for (route, part), end in zip(parts, ends, strict=True):
            if self.skip_reason is not None and not route.overlaps:
                continue
            with self.comm.phase(route.name):
                sent = end()
            if self.skip_reason is not None:
                continue
            if sent is None:
                at_fault = suspect or first_not_finite(bucket.flat, part)
                self.cancel(at_fault or "a tensor on another rank")
            else:
                shares.append(sent)
        return shares

    def sparse_mean(self, grad: Tensor) -> Tensor:
        watch = Stopwatch(self.seconds, self.comm, grad.device, self.step)
        before = self.comm.snapshot().network_sent
        with self._exchanging(f"the exchange of step {self.step}"), self.comm.phase("sparse gradients"):
            mean = sparse_mean(grad, self.comm)
        if self.skip_reason is None and not bool(mean.values().isfinite().all()):
            self.cancel("a sparse gradient")
        if self.skip_reason is not None:
            mean.values().fill_(torch.nan)
        watch.stop()
        self.dense_bytes += self.comm.snapshot().network_sent - before  # DDP gathers them too
        return mean

    def cancel(self, reason: str) -> None:
        """Skip this step, for the bad tensor `reason`. All ranks call it in the same step."""
        self.skip_reason = reason
        self._put_back()

    def _put_back(self) -> None:
        for route, part in self._changed:
            route.put_back(part)
        self._changed.clear()

    def before_step(self, optimiser: OptimiserView) -> list[str]:
        """Act before an optimiser's step; return tensors updated already."""
        for check in self.checks:
            check()
        if self.skip_reason is not None:
            raise NonFiniteError(
                f"rank {self.comm.rank}: the gradients of step {self.step - 1} are not finite"
                f" ({self.skip_reason}): no parameter was changed, and every memory is as before the step."
                " Skip the step with optimizer.zero_grad(), or train with a GradScaler, which skips it"
            )
        self.rules.follow_masks()
        for each in self.observers:
            each.before_step(optimiser, self.step - 1)
        return self.rules.step_(optimiser, self.step - 1) + self.momentum.hand_over(optimiser)

    def stats(self, buckets: int = 0) -> Stats:
        counts = {"steps": self.step, "dense": self.dense_bytes, "buckets": buckets}
        return Stats.of(self.comm.snapshot(), self.seconds, **counts, noise=self.noise.noise)

    @property
    def holds_back(self) -> bool:
        return any(route.holds_back for route in self._routes)

    def discard(self) -> None:
        self._changed.clear()
        for route in self._routes:
            route.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's memory: "<part>/<kind>/<tensor name>" to a tensor."""
        return self._memory() | self.momentum.state_dict() | self.rules.state_dict()

    def _memory(self) -> dict[str, Tensor]:
        self._put_back()
        norms = {} if self._clip is None else self._clip.state_dict()
        states = enumerate(route.state_dict() for route in self._routes)
        return norms | {f"route{i}/{key}": value for i, state in states for key, value in state.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        state = adapted(state, own := self._memory(), self.momentum.settings, rules=bool(self.method.rules))
        self.rules.check_state(state)
        self.momentum.check_state(state)
        check_shapes(own, without(("rule", "momentum/"), state), "method")

    def load_state_dict(self, state: Mapping[str, Tensor], step: int) -> None:
        """Restore memory and step count. Raises `StateError`, with nothing changed, for a wrong tensor."""
        self.check_state(state)
        self.momentum.follow(state)
        state = adapted(state, self._memory(), self.momentum.settings, rules=bool(self.method.rules))
        self.momentum.load_state_dict(state)
        if self._clip is not None:
            self._clip.load_state_dict(state)
        for i, route in enumerate(self._routes):
            route.load_state_dict(under(f"route{i}/", state))
        self.rules.load_state_dict(state)
        self.step = step
        self._reset()
