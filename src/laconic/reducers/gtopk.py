"""Global top-k: the largest entries of the sum of all ranks' largest entries.

Shi et al. 2019, arXiv:1901.04359 ("gTop-k"). Per tensor of n elements, with k = ceil(density * n):

    1. P_r = the k largest |x_r|, on each rank r
    2. all_gather of the P_r; s = 1/N * sum over ranks r = 0..N-1, in this order, of x_r at P_r
    3. mean = the k largest |s|, zero elsewhere

The paper's tree takes log2 N messages of k entries, but can miss some of the largest. Here it is exact and
costs N k entries; `oktopk` gives the same bits with O(k) traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, sent_by
from laconic.comm.skippable import gather_or_skip
from laconic.core.framing import CPU, moved
from laconic.core.layout import Layout
from laconic.core.selector import counts_per_segment
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, DensityReducer
from laconic.reducers.entries import Entries, entries_nbytes


@dataclass(frozen=True, repr=False)
class GTopk(DensityReducer):
    """mean = the k = ceil(density * n) largest entries of the average of every rank's k largest.

    The sent share is this rank's own k largest where they are among those. At most k entries of a tensor
    change. Payload: k values in 32 bits and their positions by `golomb`.

    >>> GTopk(density=0.01)
    gtopk(density=0.01)
    """

    paper: ClassVar[str] = "Shi et al. 2019, arXiv:1901.04359"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("gtopk(density=0.01)", "gtopk(density=1.0)")

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _GTopk(self.density, comm)

    def nbytes(self, layout: Layout) -> int:
        return max(1, entries_nbytes(self.density, layout.segments))


@dataclass(frozen=True)
class _GTopk(BoundReducer):
    density: float
    comm: Comm

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments, size = layout.segments, self.comm.size
        ks = counts_per_segment(self.density, segments)
        own = None if x is None else Entries.largest(x, segments, ks)
        wires = gather_or_skip(self.comm, None if own is None else own.wire(segments), out.device)
        if own is None or wires is None:
            return None
        sums = segments.zero_(out)
        for rank, wire in enumerate(moved(wires, CPU)):
            with sent_by(rank):
                theirs = Entries.read(wire, segments).on(out.device)
            kernels.scatter_add_(sums, segments, theirs.indices, theirs.counts, theirs.values, 1 / size)
        final = Entries.largest(sums, segments, ks)
        segments.zero_(out)
        kernels.scatter_add_(out, segments, final.indices, final.counts, final.values, alpha)
        starts = segments.packed.starts_tensor
        return own.share(segments, own.positions(starts), final.positions(starts), out.device)
