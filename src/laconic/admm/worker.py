"""Schedule of one block.

Mini-batch m passes block b = 0..L forward in tick m + b, and is trained on there in tick m + 2 L - b.
Neighbours use a tick's messages in the next tick.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.admm.neighbours import Neighbours
from laconic.admm.stats import Span
from laconic.admm.stored_rows import StoredRows
from laconic.admm.sub_problem import SubProblem, Visit
from laconic.core import arguments
from laconic.core.errors import PeerError, StateError

TRAINED = {"layers", "proximal", "optimizer"}
PARTS = TRAINED | {"ticks", "updates", "fed", "visits", "following", "previous", "kept"}


@dataclass(frozen=True)
class MiniBatch:
    """Part of a mini-batch: `x` on the first rank, `y` on the last."""

    rows: int
    ids: Tensor | None = None
    x: Tensor | None = None
    y: Tensor | None = None


class Worker:
    """One rank's block and its pending mini-batches.

    Shapes are those of a sample: input None on the first block, output on the last.
    """

    def __init__(
        self,
        number: int,
        last: int,
        problem: SubProblem,
        links: Neighbours,
        input_shape: torch.Size | None,
        output_shape: torch.Size | None,
        rows: StoredRows | None,
    ) -> None:
        self.number, self.last = number, last
        self.problem, self.links, self.rows = problem, links, rows
        self._input_shape, self._output_shape = input_shape, output_shape
        self.ticks = self.updates = 0
        self.forward_s = self.update_s = self.primal = self.dual = 0.0
        self.spans: list[Span] = []
        self._pending: dict[int, MiniBatch] = {}
        self._visits: dict[int, Visit] = {}
        self._following: Tensor | None = None  # wires to send in the next tick
        self._previous: Tensor | None = None

    def tick(self, batch: MiniBatch | None) -> float | None:
        with self.abort_on_error():
            self.spans = []
            if batch is not None:
                self._pending[self.ticks] = batch
            arriving, due = self.ticks - self.number, self.ticks - (2 * self.last - self.number)
            received = self.links.swap(self._following, self._previous, self._expected_shapes(arriving, due))
            self._following = self._previous = None
            if arriving in self._pending:
                self._forward(arriving, received.get("activations"))
            term = self._update(due, received.get("targets")) if due in self._pending else None
            self.ticks += 1
            return term if self.number == self.last else None

    def trained_state(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "layers": _clone(problem.layers.state_dict()),
            "proximal": {} if problem.proximal is None else _clone(problem.proximal.state_dict()),
            "optimizer": copy.deepcopy(problem.optimizer.state_dict()),
        }

    def restore_trained(self, trained: Mapping[str, Any]) -> None:
        problem = self.problem
        problem.layers.load_state_dict(trained["layers"])
        if problem.proximal is not None:
            problem.proximal.load_state_dict(trained["proximal"])
        problem.optimizer.load_state_dict(trained["optimizer"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "ticks": self.ticks,
            "updates": self.updates,
            "fed": {number: vars(each).copy() for number, each in self._pending.items()},
            "visits": {number: vars(each).copy() for number, each in self._visits.items()},
            "following": self._following,
            "previous": self._previous,
            **self.trained_state(),
            "kept": None if self.rows is None else self.rows.state_dict(),
        }

    def load_trained(self, state: Mapping[str, Any]) -> None:
        """Load block and optimiser from an untrusted state and check the rest.

        Raises `StateError`, possibly with a part loaded.
        """
        try:
            if state.keys() != PARTS or not all(type(count) is int for count in _counts(state)):
                raise StateError(f"it has {arguments.shown(state)}")
            if self.rows is not None:
                self.rows.check(state["kept"])
            _parse_pending(state)
            self.restore_trained(state)
        except Exception as error:  # torch raises errors of many kinds
            raise StateError(
                f"the saved state does not fit block {self.number + 1}, or is damaged: {error}"
            ) from error

    def load_progress(self, state: Mapping[str, Any]) -> None:
        if self.rows is not None:
            self.rows.load_state_dict(state["kept"])
        self.ticks, self.updates = _counts(state)
        self._pending, self._visits = _parse_pending(state)
        self._following, self._previous = state["following"], state["previous"]

    def _expected_shapes(self, arriving: int, due: int) -> dict[str, torch.Size]:
        found = {}
        if self._input_shape is not None and arriving in self._pending:
            found["activations"] = torch.Size((self._pending[arriving].rows, *self._input_shape))
        if self._output_shape is not None and due in self._pending:
            found["targets"] = torch.Size((self._pending[due].rows, *self._output_shape))
        return found

    def _forward(self, number: int, f: Tensor | None) -> None:
        with self._timed("forward"):
            visit = self._begin_visit(number, f)
            self._visits[number] = visit
            out = None if self._output_shape is None else self.problem.forward(visit.x)
        if out is not None:
            self._following = self.links.encode("activations", out, number)

    def _begin_visit(self, number: int, f: Tensor | None) -> Visit:
        batch = self._pending[number]
        if f is None:
            assert batch.x is not None
            return Visit(number, batch.x)
        x = self.problem.feasible(f)
        if self.rows is None:
            return Visit(number, x, torch.zeros_like(f), f, x)
        assert batch.ids is not None
        known, old_x, old_u = self.rows.read(batch.ids, f)
        seen = known.view(-1, *[1] * (f.dim() - 1))
        u = torch.where(seen, old_u + self.problem.training.dual * (old_x - f), torch.zeros_like(f))
        moved = self.problem.penalty_step(old_x, f, u)
        return Visit(number, torch.where(seen, moved, x), u, f, torch.where(seen, old_x, x), batch.ids)

    def _update(self, number: int, target: Tensor | None) -> float:
        batch, visit = self._pending.pop(number), self._visits.pop(number)
        with self._timed("update"):
            target = batch.y if target is None else target
            assert target is not None
            solved = self.problem.solve(visit, target)
            if self.rows is not None and solved.x is not None and visit.u is not None:
                assert visit.ids is not None
                self.rows.write(visit.ids, solved.x, visit.u, number)
        self.primal, self.dual = solved.primal, solved.dual
        self.updates += 1
        if solved.x is not None and visit.u is not None:
            self._previous = self.links.encode("targets", solved.x + visit.u, number)
        return solved.term

    @contextmanager
    def _timed(self, work: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.spans.append(Span(work, began, ended))
        if work == "forward":
            self.forward_s += ended - began
        else:
            self.update_s += ended - began

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            with suppress(PeerError):  # the first error is more useful
                self.links.abort()
            raise


def _counts(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["ticks"], state["updates"]


def _parse_pending(state: Mapping[str, Any]) -> tuple[dict[int, MiniBatch], dict[int, Visit]]:
    return (
        {number: MiniBatch(**each) for number, each in state["fed"].items()},
        {number: Visit(**each) for number, each in state["visits"].items()},
    )


def _clone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}
