"""Worker momentum: SGD's momentum on each rank, before the exchange. Velocities are sent.

Bernstein et al. 2019, arXiv:1810.05291 (Signum). Per tensor, with local gradient g and momentum mu:

    heavy ball   u = mu * u + g           x = u
    Nesterov     u = mu * (u + g)         x = u + g

The optimiser then applies the mean of x without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share
from laconic.feedback.memory import Memory, Velocity, copied, mark_overflow_


@dataclass(frozen=True, repr=False)
class WorkerMomentum(Feedback):
    """Velocity u and x, one float32 per element each. The momentum factor is the optimiser's."""

    paper: ClassVar[str] = "Bernstein et al. 2019, arXiv:1810.05291"
    status: ClassVar[Status] = "recalled"
    keeps_unsent: ClassVar[bool] = False

    @property
    def local_momentum(self) -> bool:
        return True

    @property
    def needs_optimiser(self) -> bool:
        return True

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        return _WorkerMomentum(layout, optimised)


class _WorkerMomentum(BoundFeedback):
    def __init__(self, layout: Layout, optimised: Optimised) -> None:
        self._velocity = Velocity(layout, optimised)
        self._optimised = optimised
        self._released = False
        self._x = Memory("x", layout)
        self._old: dict[int, Tensor] = {}  # by layout

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        self._velocity.start(turn.step)
        velocity = self._velocity.flat(layout, grad.device)
        x = layout.segments.zero_(self._x.flat(layout, grad.device))
        old = grad if free else copied(grad, layout)
        done, finite = [], True
        for part, momentum, nesterov, factor in self._velocity.forms(layout):
            done.append(part.segments)
            here = [not self._released and self._optimised.is_local(name) for name in part.names]
            local = torch.tensor(here, dtype=torch.bool, device="cpu")
            finite &= kernels.velocity_(
                velocity, x, old, x, part.segments, momentum * local, scale * factor, nesterov
            )
        if not finite:
            for segments in done:
                kernels.undo_(velocity, old, segments)
            mark_overflow_(grad, old, layout)
            return None
        self._old[id(layout)] = old
        return x

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        """Do nothing."""

    def put_back(self, layout: Layout) -> None:
        old = self._old.pop(id(layout), None)
        if old is not None:
            kernels.undo_(self._velocity.held(layout), old, layout.segments)
        self._velocity.put_back()

    def accept(self, layout: Layout) -> None:
        self._old.pop(id(layout), None)

    def release_momentum(self, kept: float | None = None) -> None:
        self._released = True

    def discard(self) -> None:
        self._old.clear()
        self._velocity.discard()

    def state_dict(self) -> dict[str, Tensor]:
        return self._velocity.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._velocity.load_state_dict(state)
