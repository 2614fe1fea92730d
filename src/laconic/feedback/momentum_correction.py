"""Momentum correction: momentum before the exchange, so that unsent entries accumulate momentum too.

Lin et al. 2018, arXiv:1712.01887 (DGC), section 3. Per tensor, with local gradient g and momentum mu:

    heavy ball   u = mu * u + g           v = v + u
    Nesterov     u = mu * (u + g)         v = v + u + g
    sent = C(v)  v = v - sent             u = 0 where sent (factor masking, against stale momentum)

The optimiser then applies the mean of `sent` without momentum. Weight decay never enters: the optimiser adds
it after the exchange. Local clipping: the norm of each rank's whole gradient, of all tensors and all routes,
is limited to clip / sqrt(N), so that the sum over N ranks has about the norm that a global threshold `clip`
would leave. `laconic.exchange.clip` says how that is done bucket by bucket. The authors' release clips each
tensor by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share
from laconic.feedback.memory import Memory, Pending, copied, mark_overflow_
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.memory.velocity import Velocity


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Feedback):
    """Velocity u, accumulator v, and v before the current step: three float32 per element.

    A fourth is needed during a step if the gradient's buffer is not free, as on a GPU. The momentum factor is
    the optimiser's.

    `masking`: clear the velocity of sent entries. `clip`: the global gradient norm whose local share limits
    each rank's gradient; None: no limit. `dense_steps`: number of first steps that are exchanged dense,
    unclipped and with the optimiser's own momentum, whose buffers then become the velocity, including any
    weight decay in them.

    >>> MomentumCorrection(clip=5.0)
    momentum_correction(clip=5.0)
    """

    masking: bool = True
    clip: float | None = None
    dense_steps: int = 0

    def __post_init__(self) -> None:
        arguments.flag("masking", self.masking)
        if self.clip is not None:
            arguments.number("clip", self.clip, above=0, hint="None leaves gradients as they are")
        arguments.whole("dense_steps", self.dense_steps)

    @property
    def warm_at(self) -> int:
        return self.dense_steps

    @property
    def clears_sent(self) -> bool:
        return self.masking

    def clip_at(self, step: int) -> float | None:
        return self.clip if self.owns_momentum(step) else None

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        return safe_gain(codec, layout)

    def owns_momentum(self, step: int) -> bool:
        return step >= self.dense_steps

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        return _Corrected(self, layout, optimised)


class _Corrected(BoundFeedback):
    def __init__(self, spec: MomentumCorrection, layout: Layout, optimised: Optimised) -> None:
        self._spec = spec
        self._velocity = Velocity(layout, optimised)
        self._residual = Memory("residual", layout)
        self._old = Memory("old", layout)  # residuals before the present step
        self._old_velocity: dict[int, Tensor] = {}  # of the present step, by layout
        self._pending = Pending(self._finish)

    def _finish(self, share: Share, layout: Layout) -> None:
        share.subtract_from_(self._residual.held(layout))
        if self._spec.masking:
            share.clear_(self._velocity.held(layout))

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        if not self._spec.owns_momentum(turn.step):
            scaled = layout.segments.scale_(grad, scale)
            return scaled if kernels.all_finite(scaled, layout.segments) else None
        self._velocity.start(turn.step)
        self._pending.finish_before(turn.step)
        velocity = self._velocity.flat(layout, grad.device)
        residual = self._residual.flat(layout, grad.device)
        momentum, nesterov = self._velocity.momentum(layout)
        old, fresh = grad if free else copied(grad, layout), self._old.flat(layout, grad.device)
        finite = kernels.velocity_(
            velocity, residual, old, fresh, layout.segments, momentum, scale, nesterov=nesterov
        )
        if not finite:
            kernels.undo_(velocity, old, layout.segments)
            mark_overflow_(grad, old, layout)
            return None
        self._old_velocity[id(layout)] = old
        self._residual.swap(self._old, layout)
        return fresh

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        if self._spec.owns_momentum(turn.step):
            self._pending.add(share, layout, turn.step)

    def put_back(self, layout: Layout) -> None:
        self._pending.drop(layout)
        old = self._old_velocity.pop(id(layout), None)
        if old is not None:
            kernels.undo_(self._velocity.held(layout), old, layout.segments)
            self._residual.swap(self._old, layout)
        self._velocity.put_back()

    def accept(self, layout: Layout) -> None:
        self._old_velocity.pop(id(layout), None)

    def discard(self) -> None:
        self._pending.clear()
        self._old_velocity.clear()
        self._velocity.zero_()
        self._residual.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        return {**self._velocity.state_dict(), **self._residual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._velocity.check(state)
        self._residual.check(state)
        self._pending.finish_all()
        self._velocity.load_state_dict(state)
        self._residual.load_state_dict(state)
