"""Gradients without feedback: unsent entries are lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback import BoundFeedback, Feedback, Optimised, Share


@dataclass(frozen=True, repr=False)
class NoFeedback(Feedback):
    """Gradients without memory, for exact and unbiased codecs. Momentum stays in the optimiser."""

    status: ClassVar[Status] = "own"
    keeps_unsent: ClassVar[bool] = False

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        return _Nothing()


class _Nothing(BoundFeedback):
    detects_non_finite: ClassVar[bool] = False  # a check would cost an extra pass
    holds_back: ClassVar[bool] = False

    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        return layout.segments.scale_(grad, scale)

    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        """Do nothing."""

    def put_back(self, layout: Layout) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise StateError(f"this route has no memory, but the saved state has {sorted(state)[0]}")
