"""Reducer that exchanges no gradients, only whether all are finite: GradScalers then skip the same steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.skippable import any_skips
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.sum import DenseShare


@dataclass(frozen=True, repr=False)
class Local(Reducer):
    """out = x. Payload: 4 bytes a bucket. No spec names it."""

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _BoundLocal(comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 if len(layout) else 0


@dataclass(frozen=True)
class _BoundLocal(BoundReducer):
    comm: Comm

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments = layout.segments
        if any_skips(self.comm, x is not None, out.device) or x is None:
            return None
        if x is not out:
            for view, to in zip(segments.views(x), segments.views(out), strict=True):
                to.copy_(view)
        segments.scale_(out, alpha)
        return DenseShare(segments.merged, None, 1.0)
