"""A share of chosen entries: a rank's own values at positions that the ranks have agreed on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.reducers.reducer import Sent


@dataclass(frozen=True)
class Chosen(Sent):
    """Entries sent as they are: values float32 (K,) at indices int32 (K,) from their segment's start.

    counts int64 (s,): how many belong to each segment. What stays behind is x with these entries at zero.
    """

    segments: Segments
    indices: Tensor
    counts: Tensor
    values: Tensor

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return kernels.scatter_add_(x, self.segments, self.indices, self.counts, self.values, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        return kernels.scatter_zero_(memory, self.segments, self.indices, self.counts)
