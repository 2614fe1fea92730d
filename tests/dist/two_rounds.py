"""A reducer of two rounds for tests: agree on a scale, then gather what is rounded to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Reducer


@dataclass(frozen=True, repr=False)
class TwoRounds(Reducer):
    """int8 codes of a scale that all ranks share: one all-reduce of maxima, then one all-gather."""

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _TwoRounds(comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 + layout.numel


@dataclass(frozen=True)
class Rounded(Sent):
    """This rank's codes."""

    parts: Mapping[int, Tensor]

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        for start, part in self.parts.items():
            x[start : start + part.numel()].add_(part, alpha=alpha)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        for start, part in self.parts.items():
            memory[start : start + part.numel()].zero_()
        return memory


@dataclass(frozen=True)
class _TwoRounds(BoundReducer):
    comm: Comm

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        views = [] if x is None else layout.segments.views(x)
        peak = max((float(view.abs().max()) for view in views), default=float("inf"))
        scale = self.comm.all_reduce(torch.tensor([peak]), "max")
        if not bool(scale.isfinite().all()) or x is None:
            return None
        unit = float(scale) / 127 or 1.0
        codes = torch.cat([(view / unit).round().to(torch.int8) for view in views])
        wires = self.comm.all_gather(codes)
        total = torch.zeros(codes.numel())
        for wire in wires:
            total += wire.float() * unit
        sizes = list(layout.segments.sizes)
        for view, part in zip(layout.segments.views(out), torch.split(total, sizes), strict=True):
            view.copy_(part * (alpha / self.comm.size))
        mine = torch.split(codes.float() * unit, sizes)
        return Rounded(dict(zip(layout.segments.starts, mine, strict=True)))
