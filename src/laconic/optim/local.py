"""Local: gradients stay where they are; ranks agree only on whether all are finite.

For methods whose exchange happens inside the optimiser's step. With one flag a bucket, a GradScaler skips
the same steps on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers.reducer import BoundReducer, Reducer, Sent
from laconic.reducers.sum import DenseShare


@dataclass(frozen=True, repr=False)
class Local(Reducer):
    """out = x. Payload: 4 bytes a bucket. Not a mean, so no spec names it; it serves `optim` only."""

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _Local(comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 if len(layout) else 0


@dataclass(frozen=True)
class _Local(BoundReducer):
    comm: Comm

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments = layout.segments
        bad = x is None or not kernels.all_finite(x, segments)
        flag = self.comm.all_reduce(torch.tensor([float(bad)], device=out.device), op="max")
        if bool(flag):
            return None
        assert x is not None
        if x is not out:
            for view, to in zip(segments.views(x), segments.views(out), strict=True):
                to.copy_(view)
        segments.scale_(out, alpha)
        return DenseShare(segments.merged, None, 1.0)
