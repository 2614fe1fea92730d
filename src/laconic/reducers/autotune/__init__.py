"""Autotune: of several candidate reductions, the one that pays on the present link is in use.

    search      times candidates alternately, and keeps the lossier of two if it certainly saves time
    duel        tests this certainty
    autotuner   decides when to search, and agrees with all ranks
    residual    error feedback, shared by all candidates; see `switched_residual` for momentum
    bound       the reduction at work

The policy is ours. Without a residual, dense buckets are summed in place: feedback took three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.minmax import MinMax
from laconic.codecs.selectors.sampled_topk import SampledTopK
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.signmean import SignMean
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.feedback import Optimised
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.autotune.bound import CHOSEN as CHOSEN
from laconic.reducers.autotune.bound import BoundAutotune as BoundAutotune
from laconic.reducers.autotune.tensors import is_matrix, sends_all
from laconic.reducers.gather import Gather
from laconic.reducers.scatter_reduce import ScatterReduce
from laconic.reducers.sum import Sum

CANDIDATES: tuple[Reducer, ...] = (
    Sum(),
    Sum(dtype="fp16"),
    ScatterReduce(MinMax(bits=8)),
    ScatterReduce(MinMax(bits=4, block=128)),
    Gather(Sparse(TopK(density=0.01), values=SignMean(), indices=GOLOMB)),
    Gather(Sparse(SampledTopK(density=0.001), indices=GOLOMB)),
)


@dataclass(frozen=True, repr=False)
class Autotune(Reducer):
    """Uses the lossiest of `candidates` for which every step down the list saves at least `gain` of a step.

    `candidates`: stateless reductions in order of loss; the first is `sum()`. The search starts dense, and
    repeats if the exchange's seconds change 1.5 times, and every `every` steps. `lossiest`: upper limit.
    `pinned`: candidate to use without timing. `lossiest_local`: upper limit if the momentum of all matrices
    can be applied before the exchange; default: `lossiest`. One-dimensional tensors are summed exactly. One
    rank alone stays dense.

    Payload: that of the candidate, plus 24 bytes after each step of a search and every 6 steps between
    searches. Memory, once a candidate has lost something: 4 bytes per element of matrices, and 8 more with
    local momentum. A candidate whose omega is at most 1/2 also sends the residual of the others, in parts of
    at most 1 / sqrt(ranks) of the gradient's norm. Two runs can have different bits; ranks of one run never
    do.

    >>> Autotune((Sum(), Sum(dtype="fp16")))
    autotune(candidates=(sum(), sum(dtype='fp16')))
    """

    status: ClassVar[Status] = "own"

    candidates: tuple[Reducer, ...] = CANDIDATES
    gain: float = 0.05
    every: int = 1000
    lossiest: Reducer | None = None
    pinned: Reducer | None = None
    lossiest_local: Reducer | None = None

    examples: ClassVar[tuple[str, ...]] = (
        "autotune()",
        "autotune((sum(), gather(sparse(topk(density=0.1)))))",
        "autotune((sum(),))",
    )

    def __post_init__(self) -> None:
        arguments.number("autotune: gain", self.gain, least=0, below=1)
        arguments.whole("autotune: every", self.every, 1)
        if not isinstance(self.candidates, tuple) or not self.candidates or self.candidates[0] != Sum():
            raise SpecError(
                f"autotune: candidates must be reducers, the first of them sum(), got {self.candidates!r}"
            )
        for candidate in self.candidates:
            arguments.piece("autotune: a candidate", candidate, Reducer, "gather(sparse(topk(density=0.01)))")
            if candidate.unaccountable:
                raise SpecError(f"autotune: {candidate!r} cannot be a candidate: {candidate.unaccountable}")
        options = ("lossiest", "pinned", "lossiest_local")
        for option, piece in zip(options, (self.lossiest, self.pinned, self.lossiest_local), strict=True):
            if piece is not None and piece not in self.candidates:
                raise SpecError(
                    f"autotune: {option} must be one of the candidates {self.candidates!r}, got {piece!r}"
                )

    @property
    def exact_mean(self) -> bool:
        return all(candidate.exact_mean for candidate in self._reachable)

    @property
    def adaptive(self) -> bool:
        return len(self._reachable) > 1

    @property
    def usable(self) -> tuple[Reducer, ...]:
        return self._until(self.last(local=False))

    @property
    def _reachable(self) -> tuple[Reducer, ...]:
        return self._until(max(self.last(local=False), self.last(local=True)))

    def _until(self, last: int) -> tuple[Reducer, ...]:
        return self.candidates[: last + 1] if self.pinned is None else (self.pinned,)

    def last(self, *, local: bool) -> int:
        lossiest = (local and self.lossiest_local) or self.lossiest
        return len(self.candidates) - 1 if lossiest is None else self.candidates.index(lossiest)

    def momentum_tensors(self, layout: Layout) -> Layout:
        matrices = layout.where(is_matrix)
        sparse = not all(sends_all(candidate, matrices) for candidate in self._reachable)
        return matrices if sparse else Layout(())

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return BoundAutotune(self, layout, comm)

    def bind_optimised(self, layout: Layout, comm: Comm, optimised: Optimised) -> BoundReducer:
        return BoundAutotune(self, layout, comm, optimised=optimised)

    def nbytes(self, layout: Layout) -> int:
        matrices, figures = layout.where(is_matrix), 24 if self.adaptive else 0
        lossy = max(candidate.nbytes(matrices) for candidate in self._reachable)
        return max(Sum().nbytes(layout), lossy + 4 * (layout.numel - matrices.numel + 1)) + figures
