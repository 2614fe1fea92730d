"""Autotune: several reductions, of which the one that pays on the link at hand is in use.

    candidates  from what loses nothing to what sends least; all tensors take the same one
    autotuner   each is timed for a few steps, and of the fastest the one that loses least is kept
    residual    one for all candidates that lose something: x = residual + g. What a candidate leaves behind
                stays there, and the next one, whichever it is, sends it

The policy is ours. Tensors of one dimension are summed as they are, whatever the candidate. Where the dense
candidate is in use and nothing is left behind, a bucket is summed in its own place, as without any of this:
by way of a route with feedback, that sum took three times as long.
"""

from __future__ import annotations

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
from laconic.comm.sent import Sent, SentParts
from laconic.core import arguments
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Entry, Layout
from laconic.core.per_layout import PerLayout
from laconic.core.turn import Turn
from laconic.feedback.error_feedback import ErrorFeedback, Residual
from laconic.feedback.memory.pending import Pending
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.autotune.autotuner import Autotuner
from laconic.reducers.gather import Gather
from laconic.reducers.scatter_reduce import ScatterReduce
from laconic.reducers.sum import Sum

CANDIDATES: tuple[Reducer, ...] = (
    Sum(),
    Sum(dtype="fp16"),
    ScatterReduce(MinMax(bits=8)),
    ScatterReduce(MinMax(bits=4, block=128)),
    Gather(Sparse(SampledTopK(density=0.01), indices=GOLOMB)),
    Gather(Sparse(SampledTopK(density=0.001), indices=GOLOMB)),
)
UNDECIDED = -1  # stands for a candidate in a saved state
CHOSEN = "once/autotune/candidate"  # in a saved state, and the seconds by which another link is noticed
USUAL = "once/autotune/exchange_s"


@dataclass(frozen=True, repr=False)
class Autotune(Reducer):
    """The least lossy of `candidates` whose step takes at most 1 + `slack` times that of the fastest.

    `candidates`: reductions in order of what they lose; the first is `sum()`, and none keeps state. The first
    steps are dense; then the others are timed, and again if the exchange's seconds change 1.5 times, or every
    `every` steps. All ranks decide alike.

    Payload: that of the candidate; 16 bytes more after each step of a search, and after every 6 steps between
    searches. Memory: a residual of 4 bytes an element of the tensors of two dimensions and more, once a
    candidate has lost something. Seconds decide, so two runs of one training may differ in their bits; ranks
    of one run never do. Of a void step the buckets that come after the one to blame leave nothing behind, as
    without a memory.

    >>> Autotune((Sum(), Sum(dtype="fp16")))
    autotune(candidates=(sum(), sum(dtype='fp16')))
    """

    candidates: tuple[Reducer, ...] = CANDIDATES
    slack: float = 0.05
    every: int = 1000

    examples: ClassVar[tuple[str, ...]] = (
        "autotune()",
        "autotune((sum(), gather(sparse(topk(density=0.1)))))",
        "autotune((sum(),))",
    )

    def __post_init__(self) -> None:
        arguments.number("autotune: slack", self.slack, least=0, most=1)
        arguments.whole("autotune: every", self.every, 1)
        if not isinstance(self.candidates, tuple) or not self.candidates or self.candidates[0] != Sum():
            raise SpecError(
                f"autotune: candidates are reducers of which the first is sum(), got {self.candidates!r}"
            )
        for candidate in self.candidates:
            arguments.piece("autotune: a candidate", candidate, Reducer, "gather(sparse(topk(density=0.01)))")
            if candidate.unaccountable:
                raise SpecError(f"autotune: {candidate!r} can be no candidate, as {candidate.unaccountable}")

    @property
    def exact_mean(self) -> bool:
        return all(candidate.exact_mean for candidate in self.candidates)

    @property
    def adaptive(self) -> bool:
        return len(self.candidates) > 1

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return BoundAutotune(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        matrices, figures = layout.where(_is_matrix), 16 if self.adaptive else 0
        lossy = max(candidate.nbytes(matrices) for candidate in self.candidates)
        return max(Sum().nbytes(layout), lossy + 4 * (layout.numel - matrices.numel + 1)) + figures


class BoundAutotune(BoundReducer):
    """At work. `clock`: seconds, as the autotuner reads them."""

    detects_non_finite: ClassVar[bool] = True  # a dense sum and the residual tell

    def __init__(
        self, spec: Autotune, layout: Layout, comm: Comm, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        matrices = layout.where(_is_matrix)
        self._candidates = [candidate.bind(matrices, comm) for candidate in spec.candidates]
        for candidate, bound in zip(spec.candidates, self._candidates, strict=True):
            if bound.state_dict():
                raise SpecError(
                    f"autotune: candidates keep no state, {candidate!r} does: take it as a method of its own"
                )
            ErrorFeedback().gain(candidate.feedback_codec(), matrices)
        self._dense = Sum().bind(layout, comm)
        self._residual = Residual(matrices)
        self._matrices = matrices
        self._holding: set[str] = set()  # tensors whose residual may not be zero
        self._emptied: Pending[None] = Pending(lambda _, part: self._holding.difference_update(part.names))
        self._parts = PerLayout(
            lambda bucket: (bucket.where(_is_matrix), bucket.where(lambda entry: not _is_matrix(entry)))
        )
        self.autotuner = Autotuner([*map(repr, spec.candidates)], comm, spec.slack, spec.every, clock)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self.autotuner.begin(turn.step, out.device)
        entered = self._clock()
        sent = self._mean(x, layout, turn, out, alpha)
        if sent is None:
            self.put_back(layout)
            return None
        if out.is_cuda:  # the clock cannot see what is still under way
            torch.cuda.current_stream(out.device).synchronize()
        self.autotuner.note(entered, self._clock())
        return sent

    def _mean(self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float) -> Sent | None:
        """By way of the candidate in use."""
        self._residual.finish_before(turn.step)
        self._emptied.finish_before(turn.step)
        candidate = self.autotuner.current
        matrices, vectors = self._parts(layout)
        if not len(matrices) or (candidate == 0 and self._holding.isdisjoint(matrices.names)):
            return self._dense.reduce(x, layout, turn, out, alpha)
        corrected = None if x is None else self._residual.correct(x, matrices, turn)
        self._holding.update(matrices.names)
        given = None if corrected is None else x
        end = self._dense.begin(given, vectors, turn, out, alpha) if len(vectors) else None
        share = self._candidates[candidate].reduce(corrected, matrices, turn, out, alpha)
        summed = end and end()
        if share is None or (end and summed is None):
            return None
        self._residual.settle(share, matrices, turn)
        if candidate == 0:
            self._emptied.add(None, matrices, turn.step)
        return share if summed is None else SentParts((summed, share))

    def put_back(self, layout: Layout) -> None:
        self.autotuner.void()
        matrices, _ = self._parts(layout)
        self._emptied.drop(matrices)
        self._residual.put_back(matrices)
        for candidate in self._candidates:
            candidate.put_back(matrices)

    @property
    def holds_back(self) -> bool:
        return True

    def discard(self) -> None:
        self._residual.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """The residual, and what was chosen, which is the same on all ranks."""
        self._emptied.finish_all()
        chosen = UNDECIDED if self.autotuner.chosen is None else self.autotuner.chosen
        decided = {
            CHOSEN: torch.tensor(chosen),
            USUAL: torch.tensor(self.autotuner.usual_s, dtype=torch.float64),
        }
        return decided | self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the state back; with no new search, if one had been decided."""
        chosen = int(state[CHOSEN])
        if not UNDECIDED <= chosen < len(self._candidates):
            raise StateError(
                f"the saved state has candidate {chosen}, here they are 0..{len(self._candidates) - 1}"
            )
        self._residual.load_state_dict(
            {key: value for key, value in state.items() if not key.startswith("once/")}
        )
        self._emptied.finish_all()
        self._holding.update(self._matrices.names)
        if chosen != UNDECIDED:
            self.autotuner.resume(chosen, float(state[USUAL]))


def _is_matrix(entry: Entry) -> bool:
    return len(entry.shape) > 1
