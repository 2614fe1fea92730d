"""Momentum correction: momentum before the exchange, so that an entry that waits keeps its history.

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

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share
from laconic.feedback.memory import Memory
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.memory.old_values import PIECE, OldValues, copy_, pieces
from laconic.feedback.memory.pending import Pending
from laconic.feedback.memory.velocity import Velocity


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Feedback):
    """Velocity u and accumulator v, two float32 an element, and one more while it is not known
    whether the step counts. Momentum is read from the optimiser.

    `masking`: clear the velocity of what was sent. `clip`: the global gradient norm whose local share limits
    each rank's gradient; None leaves gradients as they are. `dense_steps`: so many first steps are
    exchanged whole, unclipped and with the optimiser's own momentum, whose buffers then become the velocity,
    with what weight decay they hold.

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
        self._old = OldValues()
        self._waiting: dict[int, Tensor] = {}  # new velocities of the present step, by layout
        self._spares = Memory("spare", layout)  # old velocities or new residuals of the present step
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
        spare = self._spares.flat(layout, grad.device) if grad.is_cpu else None  # a GPU frees its copies
        if free and not nesterov and len(set(momentum.tolist())) == 1:
            return self._beside(grad, layout, float(momentum[0]), scale)

        def update(segments: Segments, places: slice) -> bool:
            m = momentum[places]
            return kernels.velocity_(
                velocity, residual, grad, segments, momentum=m, scale=scale, nesterov=nesterov
            )

        rooms = [grad if free else None, spare]
        finite = self._old.update_(layout, [residual, velocity], update, rooms, grad)
        return residual if finite else None

    def _beside(self, grad: Tensor, layout: Layout, momentum: float, scale: float) -> Tensor | None:
        """`correct` to the same bits, with the new u in the gradient's buffer and the new v in the spare.

        Both memories wait for `accept`.
        """
        velocity, residual = self._velocity.held(layout), self._residual.held(layout)
        new = self._spares.held(layout)
        self._waiting.pop(id(layout), None)
        for piece, _ in pieces(layout.segments, PIECE):
            runs = piece.merged
            finite = kernels.accumulate_(grad, velocity, piece, scale=momentum, decay=scale)
            for v, u, out in zip(runs.views(residual), runs.views(grad), runs.views(new), strict=True):
                torch.add(v, u, out=out)
            if not (finite and kernels.all_finite(new, runs)):
                return None
        self._waiting[id(layout)] = grad
        return new

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        if self._spec.owns_momentum(turn.step):
            self._pending.add(share, layout, turn.step)

    def put_back(self, layout: Layout) -> None:
        self._pending.drop(layout)
        self._waiting.pop(id(layout), None)
        self._old.restore(layout)
        self._velocity.put_back()

    def accept(self, layout: Layout) -> None:
        self._old.drop(layout)
        velocity = self._waiting.pop(id(layout), None)
        if velocity is not None:
            copy_(self._velocity.held(layout), velocity, layout.segments.merged)
            self._residual.swap(self._spares, layout)

    def discard(self) -> None:
        self._pending.clear()
        self._old.clear()
        self._waiting.clear()
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
