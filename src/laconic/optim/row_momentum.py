"""Momentum that grows until its entries are sent, and then decays."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share
from laconic.feedback.memory import copied
from laconic.feedback.memory.residual import Residual


@dataclass(frozen=True, repr=False)
class RowMomentum(Feedback):
    """Momentum M = M + g of this rank; after a step, M = mu * M in the sent entries.

    mu is the optimiser's momentum, 0.95 without one. State: one float32 per element. Only `dion2` uses it.
    """

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        return _RowMomentum(layout, optimised)


class _RowMomentum(Residual):
    def __init__(self, layout: Layout, optimised: Optimised) -> None:
        super().__init__(layout)
        self._optimised = optimised
        self._factors: dict[int, list[float]] = {}  # mu, by layout

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        settings = map(self._optimised.settings, layout.names)
        self._factors[id(layout)] = [float(each.get("momentum", 0.95)) for each in settings]
        super().settle(share, layout, turn)

    def _finish(self, share: Share, layout: Layout) -> None:
        held = self._residual.held(layout)
        before = copied(held, layout)
        share.clear_(held)
        views = zip(layout.segments.views(held), layout.segments.views(before), strict=True)
        for (view, old), factor in zip(views, self._factors.pop(id(layout)), strict=True):
            view.add_(old - view, alpha=factor)  # adds exactly 0 to unsent entries
