"""SparseLoCo: DiLoCo whose outer gradient is 1 to 3 % of its entries, in 2 bits, with error feedback.

    x_i <- LocalOpt(x_i, g_i)                      at every step
    e_i <- decay e_i + x - x_i                     every `every` steps; x: where all were last equal
    c_i = Q(TopK of each chunk of e_i);  e_i <- e_i - c_i
    x <- x - lr mean_j c_j;  x_i <- x

Sarfi et al. 2025, arXiv:2508.15706; constants as in the public code of Templar. Error feedback replaces outer
momentum. Differences: chunks are runs of the flat tensor, not tiles of a matrix; bins of Q have an edge at
the mean (see `centroids`); positions are Golomb coded, 7.5 bits each instead of 12; one-dimensional tensors
are averaged whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch.optim import Optimizer

from laconic.codecs.centroids import Centroids
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.chunked_topk import ChunkedTopK
from laconic.codecs.sparse import Sparse
from laconic.comm.metered import Metered
from laconic.core.spec import Status
from laconic.exchange.method import Method, Route, everything, matrices
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum
from laconic.strategies.local_steps.diloco import BoundDiLoCo, DiLoCo
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Strategy


@dataclass(frozen=True, repr=False)
class SparseLoCo(Strategy):
    """DiLoCo without momentum, over chunk-wise top-k values in a few bits with error feedback.

    Wire, every `every` steps: about density * n * (bits + log2(1 / density) + 1.5) bits, to each other rank:
    0.15 n bits by default, 210 times less than the parameters. Memory: 3 n float32.

    Args:
        every: Steps between outer steps, 1 or more; default: 30.
        density: Sent share of each chunk, in (0, 1]; default: 1/64.
        chunk: Entries of a chunk, 1 or more; default: 4096.
        bits: Bits of a value, 1 to 8; default: 2.
        decay: Share of the residual that remains at the next outer step, in (0, 1]; default: 0.95.
        lr: Outer learning rate, above 0; default: 1.

    Raises:
        SpecError: An argument is outside its range.
    """

    every: int = 30
    density: float = 1 / 64
    chunk: int = 4096
    bits: int = 2
    decay: float = 0.95
    lr: float = 1.0

    paper: ClassVar[str] = "Sarfi et al. 2025, arXiv:2508.15706"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("sparseloco()", "sparseloco(every=15, density=0.03)")

    def __post_init__(self) -> None:
        _ = self.outer

    @cached_property
    def outer(self) -> DiLoCo:
        """The equivalent `diloco`."""
        select = ChunkedTopK(self.density, chunk=self.chunk)
        gather = Gather(Sparse(select, values=Centroids(self.bits), indices=GOLOMB))
        parts = (Route(matrices, gather, ErrorFeedback(self.decay)), Route(everything, Sum()))
        return DiLoCo(self.every, lr=self.lr, momentum=0.0, compressor=Method(repr(self), parts))

    @property
    def period(self) -> int:
        return self.every

    @property
    def meets(self) -> bool:
        return True

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundStrategy:
        return BoundDiLoCo(self.outer, replica, comm, seed)
