"""Mean of random rows or columns of each matrix, chosen with a common key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentEntries
from laconic.comm.skippable import fits, sum_or_skip
from laconic.core import deferred
from laconic.core.layout import Entry, Layout
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Reducer


def axis(shape: tuple[int, ...]) -> int:
    """Return the smaller dimension, to choose slices from; 0 (rows) if equal."""
    return int(shape[1] < shape[0])


@dataclass(frozen=True, repr=False)
class ChosenRows(Reducer):
    """Mean of the ranks in ceil(fraction * s) of each matrix's s rows or columns; zero elsewhere.

    Payload: 4 bytes per chosen entry, in one all-reduce. Only `dion2` uses it.
    """

    fraction: float

    @property
    def needs_feedback(self) -> bool:
        return True

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _ChosenRows(self, comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 * max(1, sum(self.sent_of(entry) for entry in layout))

    def slices(self, entry: Entry) -> int:
        return math.ceil(self.fraction * entry.shape[axis(entry.shape)])

    def sent_of(self, entry: Entry) -> int:
        return self.slices(entry) * entry.shape[1 - axis(entry.shape)]

    def indices(self, entry: Entry, turn: Turn) -> Tensor:
        """Return the ascending indices int32 (k,) of sent entries, on the CPU."""
        along, (m, n) = axis(entry.shape), entry.shape
        size, count = torch.tensor([entry.shape[along], self.slices(entry)], dtype=torch.int64, device="cpu")
        chosen, _ = kernels.random_indices(size.reshape(1), count.reshape(1), [turn.common(entry.name)])
        other = torch.arange(m if along else n, dtype=torch.int32, device="cpu")
        grid = other[:, None] * n + chosen if along else chosen[:, None] * n + other
        return grid.flatten()


@dataclass(frozen=True)
class _ChosenRows(BoundReducer):
    spec: ChosenRows
    comm: Comm

    def writes_late(self, step: int) -> bool:
        return True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments, n = layout.segments, sum(map(self.spec.sent_of, layout))
        if x is None:
            sum_or_skip(self.comm, None, n, out.device)
            return None
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        indices = torch.cat([none, *(self.spec.indices(entry, turn) for entry in layout)]).to(out.device)
        counts = torch.tensor([*map(self.spec.sent_of, layout)], dtype=torch.int64, device="cpu")
        values = kernels.gather(x, segments, indices, counts)
        mean = sum_or_skip(self.comm, values / self.comm.size, n, out.device)  # a sum could overflow
        if mean is None or (deferred.is_late() and not fits([mean], alpha)):
            return None
        deferred.write(
            lambda: kernels.scatter_add_(segments.zero_(out), segments, indices, counts, mean, alpha)
        )
        return SentEntries(segments, indices, counts, values)
