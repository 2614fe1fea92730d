"""Residual of error feedback, also with local momentum.

Local momentum: Lin et al. 2018, arXiv:1712.01887 (DGC), section 3. Per tensor, with local gradient g and
momentum mu:

    heavy ball   u = mu * u + g           v = decay * v + u
    Nesterov     u = mu * (u + g)         v = decay * v + u + g
    waiting      v = v + ahead * mu / (1 - mu) * u,  then u = (1 - ahead) * u
    sent = C(v)  v = v - sent             u = 0 where sent, if `clears_sent`

See `error_feedback` for entries that wait. If all entries are sent, this is SGD with momentum.
The optimiser adds weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Layout, PerLayout
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Optimised, Share
from laconic.feedback.memory import Memory, Pending, Velocity, copied, mark_overflow_


class Residual(BoundFeedback):
    """Error feedback on these tensors: x = decay * residual + scale * grad."""

    def __init__(self, layout: Layout, decay: float = 1.0) -> None:
        self._decay = decay
        self._residual = Memory("residual", layout)
        self._old: dict[int, Tensor] = {}  # by layout, at the start of the step
        self._step = -1
        self._pending = Pending(self._finish)

    def _finish(self, share: Share, layout: Layout) -> None:
        share.subtract_from_(self._residual.held(layout))

    def finish_before(self, step: int) -> None:
        self._pending.finish_before(step)
        if step != self._step:
            self._step = step
            self._old.clear()

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        self.finish_before(turn.step)
        residual = self._residual.flat(layout, grad.device)
        old = grad if free else copied(residual, layout)
        if not kernels.accumulate_(residual, grad, layout.segments, scale, self._decay, keep=free):
            kernels.undo_(residual, old, layout.segments)
            if not free:
                mark_overflow_(grad, residual * self._decay + grad[: len(residual)] * scale, layout)
            return None
        self._old[id(layout)] = old
        return residual

    def release_part(
        self, grad: Tensor, layout: Layout, turn: Turn, most: float
    ) -> tuple[Tensor | None, bool]:
        """Correct with x = grad + part * residual, 0 <= part <= 1.

        The norm of the second term is at most `most` times that of the gradient. Also return whether part is
        1; x is then the memory itself.
        """
        self.finish_before(turn.step)
        held, views = self._residual.flat(layout, grad.device), layout.segments.views(grad)
        may, left = most * norm(views), self.norm(layout)
        x = held
        if left > may:
            x = held * (may / left)
            for view, more in zip(layout.segments.views(x), views, strict=True):
                view.add_(more)
        finite = self.correct(grad, layout, turn) is not None
        return x if finite else None, x is held

    def norm(self, layout: Layout) -> float:
        kept = (self._residual.tensor(name) for name in layout.names)
        return norm([each for each in kept if each is not None])

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        self._pending.add(share, layout, turn.step)

    def put_back(self, layout: Layout) -> None:
        self._pending.drop(layout)
        old = self._old.pop(id(layout), None)
        if old is not None:
            kernels.undo_(self._residual.held(layout), old, layout.segments)

    def accept(self, layout: Layout) -> None:
        self._old.pop(id(layout), None)

    def discard(self) -> None:
        self._pending.clear()
        self._old.clear()
        self._residual.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        return self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._residual.check(state)
        self._pending.finish_all()
        self._residual.load_state_dict(state)


class LocalResidual(Residual):
    """Residual v of all tensors, and velocity u of the `local` ones.

    Args:
        local: Tensors whose momentum is applied here.
        clears_sent: Clear the velocity of sent entries, as DGC does.
        ahead: As of `error_feedback`.
        dense_steps: First steps, exchanged whole, with the optimiser's momentum.
    """

    def __init__(
        self,
        local: Layout,
        layout: Layout,
        optimised: Optimised,
        decay: float = 1.0,
        *,
        clears_sent: bool = False,
        ahead: float = 0.0,
        dense_steps: int = 0,
    ) -> None:
        super().__init__(layout, decay)
        self._local = local
        self._all = layout
        self._clears_sent = clears_sent
        self._ahead = ahead
        self._dense_steps = dense_steps
        self._optimised = optimised
        self._velocity: Velocity | None = Velocity(local, optimised) if len(local) else None
        self._former = Memory("former", layout)
        self._old_velocity: dict[int, Tensor] = {}  # by layout
        self._parts = PerLayout(self._split)

    def _split(self, layout: Layout) -> tuple[Layout, Layout]:
        names = set(self._local.names)
        if names.issuperset(layout.names):
            return layout, Layout(())
        return layout.named(names), layout.where(lambda entry: entry.name not in names)

    def _finish(self, share: Share, layout: Layout) -> None:
        super()._finish(share, layout)
        if self._clears_sent and self._velocity is not None and len(self._parts(layout)[0]):
            share.clear_(self._velocity.held(layout))

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        if turn.step < self._dense_steps:
            scaled = layout.segments.scale_(grad, scale)
            return scaled if kernels.all_finite(scaled, layout.segments) else None
        local, others = self._parts(layout)
        if self._velocity is None or not len(local):
            return super().correct(grad, layout, turn, scale, free=free)
        self._velocity.start(turn.step)
        self.finish_before(turn.step)
        velocity = self._velocity.flat(layout, grad.device)
        residual = self._residual.flat(layout, grad.device)
        old, fresh = grad if free else copied(grad, layout), self._former.flat(layout, grad.device)
        finite = True
        if len(others):
            self._decayed(residual, fresh, others)
            finite = kernels.accumulate_(fresh, old, others.segments, scale)
        before = self._carried(residual, fresh, local, turn.step)
        done = []
        for part, momentum, nesterov, factor in self._velocity.forms(local):
            done.append(part)
            finite &= kernels.velocity_(
                velocity, before, old, fresh, part.segments, momentum, scale * factor, nesterov, self._ahead
            )
        if not finite:
            for part in done:
                kernels.undo_(velocity, old, part.segments)
            mark_overflow_(grad, old, layout)
            mark_overflow_(grad, fresh, layout)
            return None
        self._old_velocity[id(layout)] = old
        self._residual.swap(self._former, layout)
        return fresh

    def _carried(self, residual: Tensor, fresh: Tensor, local: Layout, step: int) -> Tensor:
        if self._decay == 1:
            return residual
        self._decayed(residual, fresh, local)
        return fresh

    def _decayed(self, residual: Tensor, fresh: Tensor, part: Layout) -> None:
        runs = part.segments.merged
        torch._foreach_copy_(runs.views(fresh), runs.views(residual))
        part.segments.scale_(fresh, self._decay)

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        if turn.step >= self._dense_steps:
            super().settle(share, layout, turn)

    def put_back(self, layout: Layout) -> None:
        super().put_back(layout)
        if self._velocity is None:
            return
        old = self._old_velocity.pop(id(layout), None)
        if old is not None:
            kernels.undo_(self._velocity.held(layout), old, self._parts(layout)[0].segments)
            self._residual.swap(self._former, layout)
        self._velocity.put_back()

    def accept(self, layout: Layout) -> None:
        super().accept(layout)
        self._old_velocity.pop(id(layout), None)

    def release_momentum(self, kept: float | None = None) -> None:
        """Leave momentum to SGD, which multiplies the effect of a residual e by 1 / (1 - m).

        So e = (1 - m) e + m `kept` u applies the rest of velocity u through the residual.
        """
        self._pending.finish_all()
        if kept is not None and self._velocity is not None and self._velocity.started:
            for entry in self._local:
                velocity = self._velocity.tensor(entry.name)
                if velocity is not None:
                    m, residual = self._momentum(entry.name), self._residual.tensor(entry.name)
                    late = velocity * (m * kept)
                    self._residual.set(entry, late if residual is None else late.add_(residual, alpha=1 - m))
        self._velocity = None
        self._old_velocity.clear()
        self._former = Memory("former", self._all)

    def _momentum(self, name: str) -> float:
        return float(self._optimised.settings(name).get("momentum", 0.0))

    def discard(self) -> None:
        super().discard()
        self._old_velocity.clear()
        if self._velocity is not None:
            self._velocity.discard()

    def state_dict(self) -> dict[str, Tensor]:
        residual = super().state_dict()
        return residual if self._velocity is None else {**self._velocity.state_dict(), **residual}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._velocity is not None:
            self._velocity.check(state)
        super().load_state_dict(state)
        if self._velocity is not None:
            self._velocity.load_state_dict(state)


def norm(parts: list[Tensor]) -> float:
    """Return the Euclidean norm of all parts.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0, 0.0])])
    5.0
    """
    return float(torch.stack(torch._foreach_norm(parts)).norm()) if parts else 0.0
