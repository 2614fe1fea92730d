"""The residual of error feedback at work: added to each gradient, less by what is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Share
from laconic.feedback.memory import Memory, Pending, copied, mark_overflow_


class Residual(BoundFeedback):
    """Error feedback at work on these tensors: x = decay * residual + scale * grad."""

    def __init__(self, layout: Layout, decay: float = 1.0) -> None:
        self._decay = decay
        self._residual = Memory("residual", layout)
        self._old: dict[int, Tensor] = {}  # old residuals of the present step, by layout
        self._step = -1  # of these
        self._pending = Pending(self._finish)

    def _finish(self, share: Share, layout: Layout) -> None:
        share.subtract_from_(self._residual.held(layout))

    def finish_before(self, step: int) -> None:
        """Subtract the shares sent before this step from the memory for good. `correct` calls this."""
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

    def bleed(self, grad: Tensor, layout: Layout, turn: Turn, most: float) -> tuple[Tensor | None, bool]:
        """As `correct`, but x = grad + part * residual, 0 <= part <= 1, whose second term has at most `most`
        times the gradient's norm. The rest stays in the memory. Also tells whether part is 1: x is then the
        memory itself.
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
        """The Euclidean norm of what is left behind of these tensors."""
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


def norm(parts: list[Tensor]) -> float:
    """The Euclidean norm of all parts together.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0, 0.0])])
    5.0
    """
    return float(torch.stack(torch._foreach_norm(parts)).norm()) if parts else 0.0
