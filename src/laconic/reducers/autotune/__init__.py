"""Autotune: of several candidate reductions, the one that pays on the present link is in use.

    search      times candidates alternately, and keeps the lossier of two if it certainly saves time
    duel        tests this certainty
    autotuner   decides when to search, and agrees with all ranks
    residual    error feedback, shared by all candidates; dense candidates send it in small parts

The policy is ours. If the dense candidate is in use and the residual is empty, a bucket is summed in place,
as in plain DDP: a route with feedback took three times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.minmax import MinMax
from laconic.codecs.selectors.sampled_topk import SampledTopK
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentParts
from laconic.core import arguments
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout, PerLayout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback.error_feedback import ErrorFeedback, Residual
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.autotune.autotuner import Autotuner
from laconic.reducers.autotune.search import Search
from laconic.reducers.autotune.tensors import is_matrix, sends_all
from laconic.reducers.gather import Gather
from laconic.reducers.scatter_reduce import ScatterReduce
from laconic.reducers.sum import DenseShare, Sum

CANDIDATES: tuple[Reducer, ...] = (
    Sum(),
    Sum(dtype="fp16"),
    ScatterReduce(MinMax(bits=8)),
    ScatterReduce(MinMax(bits=4, block=128)),
    Gather(Sparse(SampledTopK(density=0.01), indices=GOLOMB)),
    Gather(Sparse(SampledTopK(density=0.001), indices=GOLOMB)),
)
UNDECIDED = -1  # candidate number in a saved state
CHOSEN = "once/autotune/candidate"  # state key of the candidate and of the exchange seconds
USUAL = "once/autotune/exchange_s"


@dataclass(frozen=True, repr=False)
class Autotune(Reducer):
    """Uses the lossiest of `candidates` for which every step down the list saves at least `gain` of a step.

    `candidates`: stateless reductions in order of loss; the first is `sum()`. Training starts dense; lossier
    candidates are then timed as long as they pay. The search repeats if the exchange's seconds change 1.5
    times, and every `every` steps. `lossiest`: upper limit for the search. `pinned`: candidate to use from
    the first step, without timing. One-dimensional tensors are summed exactly.

    Payload: that of the candidate, plus 24 bytes after each step of a search and after every 6 steps between
    searches. Memory: a residual of 4 bytes per element of tensors with two or more dimensions, once a
    candidate has lost something. A candidate whose omega is at most 1/2 also sends the residual of the
    others, in parts of at most 1 / sqrt(ranks) of the gradient's norm. Timing decides, so two runs of one
    training can have different bits; ranks of one run never do.

    >>> Autotune((Sum(), Sum(dtype="fp16")))
    autotune(candidates=(sum(), sum(dtype='fp16')))
    """

    status: ClassVar[Status] = "own"

    candidates: tuple[Reducer, ...] = CANDIDATES
    gain: float = 0.05
    every: int = 1000
    lossiest: Reducer | None = None
    pinned: Reducer | None = None

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
        for option, piece in (("lossiest", self.lossiest), ("pinned", self.pinned)):
            if piece is not None and piece not in self.candidates:
                raise SpecError(
                    f"autotune: {option} must be one of the candidates {self.candidates!r}, got {piece!r}"
                )

    @property
    def exact_mean(self) -> bool:
        return all(candidate.exact_mean for candidate in self.usable)

    @property
    def adaptive(self) -> bool:
        return len(self.usable) > 1

    @property
    def usable(self) -> tuple[Reducer, ...]:
        if self.pinned is not None:
            return (self.pinned,)
        return self.candidates[: self.last + 1]

    @property
    def last(self) -> int:
        return len(self.candidates) - 1 if self.lossiest is None else self.candidates.index(self.lossiest)

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return BoundAutotune(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        matrices, figures = layout.where(is_matrix), 24 if self.adaptive else 0
        lossy = max(candidate.nbytes(matrices) for candidate in self.usable)
        return max(Sum().nbytes(layout), lossy + 4 * (layout.numel - matrices.numel + 1)) + figures


class BoundAutotune(BoundReducer):
    """Working autotune reduction. `clock`: returns seconds, for the autotuner."""

    detects_non_finite: ClassVar[bool] = True  # the dense sum and the residual check

    def __init__(
        self, spec: Autotune, layout: Layout, comm: Comm, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        matrices = layout.where(is_matrix)
        self._candidates = [candidate.bind(matrices, comm) for candidate in spec.candidates]
        for candidate, bound in zip(spec.candidates, self._candidates, strict=True):
            if bound.state_dict():
                raise SpecError(f"autotune: candidates must be stateless, {candidate!r} is not: use it alone")
            ErrorFeedback().gain(candidate.feedback_codec(), matrices)
        self._dense = Sum().bind(layout, comm)
        self._residual = Residual(matrices)
        self._matrices = matrices
        self._holding: set[str] = set()
        self._bleeding: set[str] = set()
        self._used = 0  # candidate of the last step
        self._before: tuple[int, int, set[str], set[str]] | None = None  # step, and these three before it
        self._most = 1 / math.sqrt(comm.size)  # least share of a gradient's norm that the mean retains
        self._whole = [sends_all(candidate, matrices) for candidate in spec.candidates]
        self._parts = PerLayout(
            lambda bucket: (bucket.where(is_matrix), bucket.where(lambda entry: not is_matrix(entry)))
        )
        twice = [place for place, whole in enumerate(self._whole) if not whole]
        pinned = None if spec.pinned is None else spec.candidates.index(spec.pinned)
        names, search = [*map(repr, spec.candidates)], Search(spec.gain, spec.last, twice)
        self.autotuner = Autotuner(names, comm, search, spec.every, clock, pinned)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self.autotuner.begin(turn.step, out.device)
        if self._before is None or self._before[0] != turn.step:
            self._before = turn.step, self._used, set(self._holding), set(self._bleeding)
        entered = self._clock()
        self._residual.finish_before(turn.step)
        matrices, vectors = self._parts(layout)
        candidate = self.autotuner.current
        if candidate != self._used:
            self._used, self._bleeding = candidate, set(self._holding)
        late = candidate == 0 and not self._is_empty(matrices)
        if late:
            sent = self._all_at_once(x, layout, matrices, turn, out, alpha)
        elif candidate == 0 or not len(matrices):
            sent = self._dense.reduce(x, layout, turn, out, alpha)
        else:
            sent = self._mean(x, matrices, vectors, turn, out, alpha)
        if sent is None:
            self.put_back(layout)
            return None
        if out.is_cuda:  # the clock does not see pending GPU work
            torch.cuda.current_stream(out.device).synchronize()
        self.autotuner.note(entered, self._clock(), apart=late)
        return sent

    def _mean(
        self, x: Tensor | None, matrices: Layout, vectors: Layout, turn: Turn, out: Tensor, alpha: float
    ) -> Sent | None:
        """Reduce matrices by the candidate in use, with feedback."""
        corrected = None if x is None else self._corrected(x, matrices, turn)
        self._holding.update(matrices.names)
        given = None if corrected is None else x
        end = self._dense.begin(given, vectors, turn, out, alpha) if len(vectors) else None
        share = self._candidates[self._used].reduce(corrected, matrices, turn, out, alpha)
        summed = end and end()
        if share is None or (end and summed is None):
            return None
        self._residual.settle(share, matrices, turn)
        return share if summed is None else SentParts((summed, share))

    def _all_at_once(
        self, x: Tensor | None, layout: Layout, matrices: Layout, turn: Turn, out: Tensor, alpha: float
    ) -> Sent | None:
        """Reduce densely, with part of the residual, by the collectives that all other ranks use."""
        given = x if x is None or x is out else x.clone()
        corrected = None if x is None else self._corrected(x, matrices, turn)
        if given is None or corrected is None:
            return self._dense.reduce(None, layout, turn, out, alpha)
        views = matrices.segments.views
        for view, value in zip(views(given), views(corrected), strict=True):
            view.copy_(value)
        sent = self._dense.reduce(given, layout, turn, out, alpha)
        if sent is not None:
            share = DenseShare(matrices.segments, torch.cat(views(corrected)), 1.0)
            self._residual.settle(share, matrices, turn)
        return sent

    def _corrected(self, x: Tensor, matrices: Layout, turn: Turn) -> Tensor | None:
        """Return x plus the residual, limited per step if the candidate sends everything."""
        if not self._whole[self._used] or self._bleeding.isdisjoint(matrices.names):
            return self._residual.correct(x, matrices, turn)
        corrected, all_of_it = self._residual.bleed(x, matrices, turn, self._most)
        if all_of_it:
            self._bleeding.difference_update(matrices.names)
        return corrected

    def _is_empty(self, matrices: Layout) -> bool:
        if self._holding.isdisjoint(matrices.names):
            return True
        if self._residual.norm(matrices) > 0:
            return False
        self._holding.difference_update(matrices.names)
        return True

    def put_back(self, layout: Layout) -> None:
        self.autotuner.put_back()
        if self._before is not None:
            self._used, self._holding, self._bleeding = self._before[1], *map(set, self._before[2:])
        matrices = self._parts(layout)[0]
        self._residual.put_back(matrices)
        for each in self._candidates:
            each.put_back(matrices)

    def accept(self, layout: Layout) -> None:
        self._before = None
        self.autotuner.accept()
        matrices = self._parts(layout)[0]
        self._residual.accept(matrices)
        for each in self._candidates:
            each.accept(matrices)

    @property
    def checks_mean(self) -> bool:
        return self._used == 0

    @property
    def holds_back(self) -> bool:
        return True

    def discard(self) -> None:
        self._residual.discard()

    def state_dict(self) -> dict[str, Tensor]:
        chosen = UNDECIDED if self.autotuner.chosen is None else self.autotuner.chosen
        decided = {
            CHOSEN: torch.tensor(chosen, dtype=torch.int64, device="cpu"),
            USUAL: torch.tensor(self.autotuner.usual_s, dtype=torch.float64, device="cpu"),
        }
        return decided | self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        chosen = int(state[CHOSEN])
        if not UNDECIDED <= chosen < len(self._candidates):
            raise StateError(
                f"the saved state has candidate {chosen}, expected 0..{len(self._candidates) - 1}"
            )
        self._residual.load_state_dict(
            {key: value for key, value in state.items() if not key.startswith("once/")}
        )
        self._holding.update(self._matrices.names)
        self._bleeding.update(self._matrices.names)
        if chosen != UNDECIDED:
            self.autotuner.resume(chosen, float(state[USUAL]))
