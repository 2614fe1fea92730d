"""Ladder: several reductions, of which each bucket takes the one that pays on the link at hand.

    rungs      from what loses nothing to what sends least
    trial      each is timed for a few steps, and the least compression among the fastest taken (see `trial`)
    memory     one residual for all rungs that lose something: x = residual + g. What a rung leaves behind
               stays there, and the next rung, whichever it is, sends it

The policy is ours. Tensors of one dimension are summed as they are, on every rung.
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
from laconic.core import arguments
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Entry, Layout
from laconic.core.per_layout import PerLayout
from laconic.core.turn import Turn
from laconic.feedback.contraction import safe_gain
from laconic.feedback.error_feedback import Residual
from laconic.feedback.pending import Pending
from laconic.reducers.gather import Gather
from laconic.reducers.reducer import BoundReducer, Reducer, Sent
from laconic.reducers.scatter_reduce import ScatterReduce
from laconic.reducers.sum import Sum
from laconic.reducers.trial import Trial

RUNGS: tuple[Reducer, ...] = (
    Sum(),
    Sum(dtype="fp16"),
    ScatterReduce(MinMax(bits=8)),
    ScatterReduce(MinMax(bits=4, bucket=128)),
    Gather(Sparse(SampledTopK(density=0.01), indices=GOLOMB)),
    Gather(Sparse(SampledTopK(density=0.001), indices=GOLOMB)),
)
UNDECIDED = -1  # stands for a rung in a saved state
USUAL = "once/usual_s/exchange"  # in a saved state, so that another link is noticed


@dataclass(frozen=True, repr=False)
class Ladder(Reducer):
    """The least compression of `rungs` whose step takes at most 1 + `slack` times that of the fastest.

    `rungs`: reductions in order of what they lose; the first is `sum()`, and none keeps state. They are timed
    during the first steps, again when the seconds in the exchange have changed by half, and every `every`
    steps. All ranks decide alike. A bucket is what DDP hands over; each has a rung of its own.

    Payload: that of the rung; after each rung of a trial 16 bytes a bucket and 16 more, and 16 bytes every 6
    steps after it. Memory: a residual of 4 bytes an element of the tensors of two dimensions and more.
    Seconds decide, so two runs of one training may differ in their bits; ranks of one run never do. Of a void
    step the buckets that come after the one to blame leave nothing behind, as without a memory.

    >>> Ladder((Sum(), Sum(dtype="fp16")))
    ladder(rungs=(sum(), sum(dtype='fp16')))
    """

    rungs: tuple[Reducer, ...] = RUNGS
    slack: float = 0.05
    every: int = 1000

    examples: ClassVar[tuple[str, ...]] = (
        "ladder()",
        "ladder((sum(), gather(sparse(topk(density=0.1)))))",
        "ladder((sum(),))",
    )

    def __post_init__(self) -> None:
        arguments.number("ladder: slack", self.slack, least=0, most=1)
        arguments.whole("ladder: every", self.every, 1)
        if not isinstance(self.rungs, tuple) or not self.rungs or self.rungs[0] != Sum():
            raise SpecError(f"ladder: rungs are reducers of which the first is sum(), got {self.rungs!r}")
        for rung in self.rungs:
            arguments.piece("ladder: a rung", rung, Reducer, "gather(sparse(topk(density=0.01)))")
            if rung.unaccountable:
                raise SpecError(f"ladder: {rung!r} can be no rung, as {rung.unaccountable}")

    @property
    def exact_mean(self) -> bool:
        return all(rung.exact_mean for rung in self.rungs)

    @property
    def adaptive(self) -> bool:
        return len(self.rungs) > 1

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return Climber(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        matrices, told = _matrices(layout), 8 * (2 * max(1, len(layout)) + 2) if self.adaptive else 0
        lossy = max(rung.nbytes(matrices) for rung in self.rungs) + 4 * (layout.numel - matrices.numel + 1)
        return max(Sum().nbytes(layout), lossy) + told


@dataclass(frozen=True)
class Together(Sent):
    """Shares of different tensors of one bucket."""

    shares: tuple[Sent, ...]

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        for share in self.shares:
            share.add_to_(x, alpha)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        for share in self.shares:
            share.clear_(memory)
        return memory


class Climber(BoundReducer):
    """At work. `clock`: seconds, as a trial reads them."""

    def __init__(
        self, spec: Ladder, layout: Layout, comm: Comm, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._layout, self._clock = layout, clock
        matrices = _matrices(layout)
        self._rungs = [rung.bind(matrices, comm) for rung in spec.rungs]
        for rung, bound in zip(spec.rungs, self._rungs, strict=True):
            if bound.state_dict():
                raise SpecError(f"ladder: rungs keep no state, {rung!r} does: take it as a method of its own")
            safe_gain(rung.codec(), matrices)
        self._dense = Sum().bind(layout, comm)
        self._residual = Residual(matrices)
        self._holding: set[str] = set()  # tensors whose residual may not be zero
        self._emptied: Pending[None] = Pending(lambda _, part: self._holding.difference_update(part.names))
        self._parts = PerLayout(lambda bucket: (_matrices(bucket), bucket.where(_is_vector)))
        self.trial = Trial([repr(rung) for rung in spec.rungs], comm, spec.slack, spec.every, clock)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self.trial.begin(turn.step, out.device)
        entered = self._clock()
        rung = self.trial.rung(layout.names)
        sent = self._on(rung, x, layout, turn, out, alpha)
        if sent is None:
            self.put_back(layout)
            return None
        if out.is_cuda:  # the clock cannot see what is still under way
            torch.cuda.current_stream(out.device).synchronize()
        self.trial.note(layout.names, entered, self._clock())
        return sent

    def _on(
        self, rung: int, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float
    ) -> Sent | None:
        """The mean by way of one rung."""
        self._residual.finish_before(turn.step)
        self._emptied.finish_before(turn.step)
        matrices, vectors = self._parts(layout)
        if not len(matrices) or (rung == 0 and self._holding.isdisjoint(matrices.names)):
            return self._dense.reduce(x, layout, turn, out, alpha)
        corrected = None if x is None else self._residual.correct(x, matrices, turn)
        self._holding.update(matrices.names)
        given = None if corrected is None else x
        end = self._dense.begin(given, vectors, turn, out, alpha) if len(vectors) else None
        share = self._rungs[rung].reduce(corrected, matrices, turn, out, alpha)
        summed = end and end()
        if share is None or (end and summed is None):
            return None
        self._residual.settle(share, matrices, turn)
        if rung == 0:
            self._emptied.add(None, matrices, turn.step)
        return share if summed is None else Together((summed, share))

    def put_back(self, layout: Layout) -> None:
        self.trial.void()
        matrices, _ = self._parts(layout)
        self._emptied.drop(matrices)
        self._residual.put_back(matrices)
        for rung in self._rungs:
            rung.put_back(matrices)

    def state_dict(self) -> dict[str, Tensor]:
        """The residual, and the rung that each tensor stands on, which is the same on all ranks."""
        self._emptied.finish_all()
        plan = self.trial.plan or {}
        rungs = {f"once/rung/{name}": torch.tensor(plan.get(name, UNDECIDED)) for name in self._layout.names}
        usual = {USUAL: torch.tensor(self.trial.usual_s, dtype=torch.float64)}
        return rungs | usual | self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the state back, and go on without a new trial, where one had been decided."""
        plan = {name: int(state[f"once/rung/{name}"]) for name in self._layout.names}
        wrong = next((rung for rung in plan.values() if not UNDECIDED <= rung < len(self._rungs)), None)
        if wrong is not None:
            raise StateError(f"the saved state has rung {wrong}, this ladder 0..{len(self._rungs) - 1}")
        self._residual.load_state_dict(
            {key: value for key, value in state.items() if not key.startswith("once/")}
        )
        self._emptied.finish_all()
        self._holding.update(_matrices(self._layout).names)
        if UNDECIDED not in plan.values():
            self.trial.resume(plan, float(state[USUAL]))


def _is_vector(entry: Entry) -> bool:
    return len(entry.shape) < 2


def _matrices(layout: Layout) -> Layout:
    return layout.where(lambda entry: not _is_vector(entry))
