"""CLT-k, the cyclic local top-k: in each step one rank chooses the entries that all ranks send.

Chen et al. 2020, arXiv:2104.11125 ("ScaleCom"). In step t of N ranks, per tensor, with k = ceil(density * n):

    1. the leader, rank t mod N, broadcasts the positions S of its k largest |x_i|
    2. mean = 1/N * sum over ranks of x_r at S, by one all_reduce of k values; zero elsewhere

The paper's low-pass filter of the residual, and its selection by short chunks, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentEntries, sent_by
from laconic.comm.skippable import broadcast_or_skip, fits
from laconic.core import deferred
from laconic.core.layout import Layout
from laconic.core.selector import counts_per_segment
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, DensityReducer
from laconic.reducers.entries import entries_nbytes, positions_read, positions_wire


@dataclass(frozen=True, repr=False)
class CLTk(DensityReducer):
    """mean = the average over ranks at the positions of the leader's k = ceil(density * n) largest.

    Exactly k entries of a tensor change, fewer if the leader's are zero. Payload: k float32 per rank; from
    the leader also 8 bytes, 4 per tensor and the positions by `golomb`.

    >>> CLTk(density=0.01)
    cltk(density=0.01)
    """

    paper: ClassVar[str] = "Chen et al. 2020, arXiv:2104.11125"
    status: ClassVar[Status] = "partial"
    code: ClassVar[str] = "kljp/deft"
    examples: ClassVar[tuple[str, ...]] = ("cltk(density=0.01)", "cltk(density=1.0)")

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _CLTk(self.density, comm)

    def nbytes(self, layout: Layout) -> int:
        return 8 + entries_nbytes(self.density, layout.segments)


@dataclass(frozen=True)
class _CLTk(BoundReducer):
    density: float
    comm: Comm

    def writes_late(self, step: int) -> bool:
        return True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments, leader = layout.segments, turn.step % self.comm.size
        own = None if x is None else out.new_empty(0, dtype=torch.uint8)
        if x is not None and self.comm.rank == leader:
            own = positions_wire(
                *kernels.topk(x, segments, counts_per_segment(self.density, segments)), segments
            )
        wire = broadcast_or_skip(self.comm, leader, own, out.device)
        if x is None or wire is None:
            return None
        with sent_by(leader):
            indices, counts = positions_read(wire, segments)
        values = kernels.gather(x, segments, indices, counts)
        mean = self.comm.all_reduce(values / self.comm.size)  # a sum could overflow
        if deferred.is_late() and not fits([mean], alpha):
            return None
        deferred.write(
            lambda: kernels.scatter_add_(segments.zero_(out), segments, indices, counts, mean, alpha)
        )
        return SentEntries(segments, indices, counts, values)
