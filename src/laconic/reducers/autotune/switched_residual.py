"""Residual of tensors whose momentum alternates between SGD and the exchange.

With momentum m in the optimiser, an entry of the residual e adds e / (1 - m) to all later updates; with local
momentum it is applied once. So e changes its unit at a switch:

    to local        u = SGD's buffer            e = e / (1 - m)         x = e + m * u + g
    back            SGD's buffer = mean of u    e = (1 - m) * e         x = e + g

Local momentum: Lin et al. 2018, arXiv:1712.01887 (DGC); the switches are ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.feedback import Optimised, Share
from laconic.feedback.memory import Velocity
from laconic.feedback.memory.residual import LocalResidual, Residual, norm

NEVER = -1  # a step


class SwitchedResidual(LocalResidual):
    """Residual of tensors whose momentum is all in SGD (at first) or all local."""

    def __init__(self, layout: Layout, optimised: Optimised, ahead: float) -> None:
        super().__init__(layout, layout, optimised, ahead=ahead)
        self._optimised = optimised
        self.local = False
        self._entered = NEVER  # the step that made it local, until it is accepted

    def make_local(self, step: int) -> None:
        """Apply momentum here from this step on. Shares of earlier steps must be final."""
        if not self.local:
            self.local, self._entered = True, step

    def give_back(self, comm: Comm) -> None:
        """Leave momentum to SGD, between steps, on all ranks: one dense exchange of u."""
        if not self.local:
            return
        self._pending.finish_all()
        assert self._velocity is not None
        held = {entry.name: self._velocity.tensor(entry.name) for entry in self._all}
        parts = {name: value for name, value in held.items() if value is not None}
        mean = comm.mean_(torch.cat([*parts.values()]))
        means = mean.split_with_sizes([part.numel() for part in parts.values()])
        for name, velocity in zip(parts, means, strict=True):
            self._optimised.continue_momentum(name, velocity)
            if (residual := self._residual.tensor(name)) is not None:
                residual.mul_(1 - self._momentum(name))
        self.release_momentum()

    def release_momentum(self, kept: float | None = None) -> None:
        super().release_momentum(kept if self.local else None)
        self._velocity = Velocity(self._all, self._optimised)
        self.local = False

    def _finish(self, share: Share, layout: Layout) -> None:
        if self.local:
            super()._finish(share, layout)
        else:
            Residual._finish(self, share, layout)

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        if self.local:
            return super().correct(grad, layout, turn, scale, free=free)
        return Residual.correct(self, grad, layout, turn, scale, free=free)

    def _carried(self, residual: Tensor, fresh: Tensor, local: Layout, step: int) -> Tensor:
        if step != self._entered:
            return residual
        views = zip(local, local.segments.views(residual), local.segments.views(fresh), strict=True)
        for entry, old, new in views:
            torch.div(old, 1 - self._momentum(entry.name), out=new)
        return fresh

    def release_part(
        self, grad: Tensor, layout: Layout, turn: Turn, most: float
    ) -> tuple[Tensor | None, bool]:
        if not self.local:
            return super().release_part(grad, layout, turn, most)
        fresh = self.correct(grad, layout, turn)
        if fresh is None:
            return None, False
        views = layout.segments.views
        before = self._former.held(layout)
        update = fresh - before
        may, left = most * norm(views(update)), norm(views(before))
        if left <= may:
            return fresh, True
        return update.add_(before, alpha=may / left), False

    def put_back(self, layout: Layout) -> None:
        super().put_back(layout)
        if self._entered != NEVER:
            self.local, self._entered = False, NEVER

    def accept(self, layout: Layout) -> None:
        super().accept(layout)
        self._entered = NEVER

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._entered = NEVER

    def resume(self, *, local: bool) -> None:
        """Continue with a loaded state. `local`: the same on all ranks."""
        self.local = local
        if not local:
            self.release_momentum()
