"""Mean residual: the loss of the second rounding, stored by the rank that reduces the piece."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.partition import packed, piece
from laconic.core.layout import Layout
from laconic.feedback.memory import Memory, Pending
from laconic.reducers.scatter_reduce.cuts import cuts

KIND = "once/mean"  # one rank holds each element for all: see `laconic.resize`


class MeanResidual:
    """One float32 for each element of this rank's pieces."""

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self._layout = layout
        bounds = cuts(layout, comm.size)
        self._bounds = {name: (*pairwise(each),)[comm.rank] for name, each in bounds.items()}
        own = (
            piece(entry, *self._bounds[entry.name])
            for entry in layout
            if self._bounds[entry.name][0] < self._bounds[entry.name][1]
        )
        self._pieces = {entry.name.rpartition("[")[0]: entry for entry in packed(Layout(tuple(own)))}
        self._memory = Memory("pieces", Layout(tuple(self._pieces.values())))
        self._pending: Pending[Tensor] = Pending(self._finish)

    def begin(self, step: int) -> None:
        self._pending.finish_before(step)

    def add_to_(self, mean: Tensor, home: Layout) -> Tensor:
        return mean.add_(self._memory.flat(home, mean.device)) if home.numel else mean

    def keep(self, left: Tensor, home: Layout, step: int) -> None:
        self._pending.add(left, home, step)

    def put_back(self, home: Layout) -> None:
        self._pending.drop(home)

    def discard(self) -> None:
        self._pending.clear()
        self._memory.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        state = {}
        for entry in self._layout:
            whole = torch.zeros(entry.numel, dtype=torch.float32, device=self._memory.device)
            held = self._held(entry.name)
            if held is not None:
                whole[slice(*self._bounds[entry.name])] = held
            state[f"{KIND}/{entry.name}"] = whole.view(entry.shape)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        Memory(KIND, self._layout).check(state)
        self._pending.finish_all()
        for name, entry in self._pieces.items():
            whole = state[f"{KIND}/{name}"].to(torch.float32).flatten()
            self._memory.set(entry, whole[slice(*self._bounds[name])])

    def _held(self, name: str) -> Tensor | None:
        return self._memory.tensor(self._pieces[name].name) if name in self._pieces else None

    def _finish(self, left: Tensor, home: Layout) -> None:
        self._memory.held(home).copy_(left)
