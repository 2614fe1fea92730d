"""BoundAutotune: the bound reduction, with one residual for all candidates."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentParts
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout, PerLayout
from laconic.core.turn import Turn
from laconic.feedback import Optimised
from laconic.feedback.error_feedback import ErrorFeedback, Residual
from laconic.reducers import BoundReducer
from laconic.reducers.autotune.autotuner import Autotuner
from laconic.reducers.autotune.search import Search
from laconic.reducers.autotune.switched_residual import SwitchedResidual
from laconic.reducers.autotune.tensors import is_matrix, sends_all
from laconic.reducers.sum import DenseShare, Sum

if TYPE_CHECKING:
    from laconic.reducers.autotune import Autotune

UNDECIDED = -1  # candidate number in a saved state
CHOSEN = "once/autotune/candidate"
USUAL = "once/autotune/exchange_s"
LOCAL = "once/autotune/local"
UNMEASURED = -1.0  # exchange seconds of a rank alone, whose decision does not count for more ranks

log = logging.getLogger("laconic")


class BoundAutotune(BoundReducer):
    """Bound reduction. `optimised`: the optimiser's side, for momentum before the exchange."""

    detects_non_finite: ClassVar[bool] = True

    def __init__(
        self,
        spec: Autotune,
        layout: Layout,
        comm: Comm,
        clock: Callable[[], float] = time.perf_counter,
        optimised: Optimised | None = None,
    ) -> None:
        self._spec, self._comm, self._clock = spec, comm, clock
        matrices = layout.where(is_matrix)
        self._candidates = [candidate.bind(matrices, comm) for candidate in spec.candidates]
        for candidate, bound in zip(spec.candidates, self._candidates, strict=True):
            if bound.state_dict():
                raise SpecError(f"autotune: candidates must be stateless, {candidate!r} is not: use it alone")
            ErrorFeedback().gain(candidate.feedback_codec(), matrices)
        self._dense = Sum().bind(layout, comm)
        self._switched: SwitchedResidual | None = None
        if optimised is not None and len(matrices) and all(map(optimised.is_local, matrices.names)):
            lossy = (each.ahead for each in spec.candidates if not sends_all(each, matrices))
            self._switched = SwitchedResidual(matrices, optimised, min(lossy, default=0.0))
        self._residual = self._switched or Residual(matrices)
        self._matrices, self._names = matrices, frozenset(matrices.names)
        self._holding: set[str] = set()  # tensors whose residual may not be zero
        self._releasing: set[str] = set()  # with more residual than a step should add
        self._stepped = True  # since the last backward pass
        self._used = 0
        # step; `_used`, `_holding` and `_releasing` before it
        self._before: tuple[int, int, set[str], set[str]] | None = None
        # limit of |added residual| / |gradient|: |mean| / |gradient| of unrelated gradients
        self._residual_share = 1 / math.sqrt(comm.size)
        self._whole = [sends_all(candidate, matrices) for candidate in spec.candidates]
        self._parts = PerLayout(
            lambda bucket: (bucket.where(is_matrix), bucket.where(lambda entry: not is_matrix(entry)))
        )
        need_twice_the_gain = [place for place, whole in enumerate(self._whole) if not whole]
        pinned = None if spec.pinned is None else spec.candidates.index(spec.pinned)
        self._alone = comm.size == 1 and pinned is None
        last = spec.last(local=self._switched is not None)
        names, search = [*map(repr, spec.candidates)], Search(spec.gain, last, need_twice_the_gain)
        self.autotuner = Autotuner(names, comm, search, spec.every, clock, 0 if self._alone else pinned)
        if self._alone:
            self.autotuner.usual_s = UNMEASURED

    def begin_pass(self, *, stepped: bool) -> None:
        self._stepped = stepped
        if self._switched is None or not self._switched.local or not stepped:
            return
        if not self.autotuner.searching and self._whole[self.autotuner.current]:
            self._log("SGD's momentum is back in the optimiser")
            self._switched.give_back(self._comm)
            self._releasing = set(self._holding)

    def release_momentum(self, kept: float | None = None) -> None:
        if self._switched is not None:
            if self._switched.local and kept is not None:
                self._holding = set(self._names)
                self._releasing = set(self._names)
            self._switched.release_momentum(kept)
            self._switched = None
            self.autotuner.limit(self._spec.last(local=False))

    @property
    def momentum_names(self) -> Collection[str]:
        return self._names if self._switched is not None and self._switched.local else ()

    def _log(self, text: str, *values: object) -> None:
        if self._comm.rank == 0:
            log.info(text, *values)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self.autotuner.begin(turn.step, out.device)
        if self._before is None or self._before[0] != turn.step:
            self._before = turn.step, self._used, set(self._holding), set(self._releasing)
        entered = self._clock()
        self._residual.finish_before(turn.step)
        matrices, vectors = self._parts(layout)
        candidate = self.autotuner.current
        if candidate != self._used:
            self._used, self._releasing = candidate, set(self._holding)
        self._apply_momentum(turn.step)
        drains_residual = candidate == 0 and not self._is_empty(matrices)
        if drains_residual or (candidate == 0 and len(matrices) and self.momentum_names):
            sent = self._all_at_once(x, layout, matrices, turn, out, alpha)
        elif candidate == 0 or not len(matrices):
            sent = self._dense.reduce(x, layout, turn, out, alpha)
        else:
            sent = self._mean(x, matrices, vectors, turn, out, alpha)
        if sent is None:
            self.put_back(layout)
            return None
        if out.is_cuda and self.autotuner.times:  # the clock does not see pending GPU work
            torch.cuda.current_stream(out.device).synchronize()
        self.autotuner.note(entered, self._clock(), uncounted=drains_residual)
        return sent

    def _apply_momentum(self, step: int) -> None:
        if self._alone:
            self._log("one rank: sum() from step %d on, as there is no exchange to save", step)
            self._alone = False
        if self._switched is None or self._switched.local or not self._stepped:
            return
        if not self._whole[self._used]:
            self._log(
                "from step %d on: SGD's momentum is applied before the exchange, for sparse steps", step
            )
            self._switched.make_local(step)

    def _mean(
        self, x: Tensor | None, matrices: Layout, vectors: Layout, turn: Turn, out: Tensor, alpha: float
    ) -> Sent | None:
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
        if not self._whole[self._used] or self._releasing.isdisjoint(matrices.names):
            return self._residual.correct(x, matrices, turn)
        corrected, all_of_it = self._residual.release_part(x, matrices, turn, self._residual_share)
        if all_of_it:
            self._releasing.difference_update(matrices.names)
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
            self._used, self._holding, self._releasing = self._before[1], *map(set, self._before[2:])
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
            LOCAL: torch.tensor(bool(self.momentum_names), dtype=torch.int64, device="cpu"),
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
        if isinstance(self._residual, SwitchedResidual):
            self._residual.resume(local=bool(state[LOCAL]))
            if self._switched is None:  # momentum that was released stays in the optimiser
                self._residual.release_momentum(1.0)
        self._holding.update(self._matrices.names)
        self._releasing.update(self._matrices.names)
        if chosen != UNDECIDED and state[USUAL] != UNMEASURED:
            self.autotuner.resume(chosen, float(state[USUAL]))
