"""Worker: one block at work, tick by tick: which mini-batch is forwarded, and which is trained on.

Mini-batch m, which comes in tick m, passes block b = 0..L forward in tick m + b, and is trained on there in
tick m + 2 L - b: on the last block in the same tick, before it one block a tick. So in each tick every block
forwards one mini-batch and trains on an older one, and what it sends is needed by a neighbour in the next.
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

from laconic.admm.kept import Kept
from laconic.admm.neighbours import Neighbours
from laconic.admm.stats import Span
from laconic.admm.sub_problem import SubProblem, Visit
from laconic.core import arguments
from laconic.core.errors import PeerError, StateError

TRAINED = {"layers", "proximal", "optimizer"}  # parts of a state
PARTS = TRAINED | {"ticks", "updates", "fed", "visits", "following", "previous", "kept"}


@dataclass(frozen=True)
class Fed:
    """One mini-batch as a rank knows it. `x`: on the first one; `y`: on the last."""

    rows: int
    ids: Tensor | None = None
    x: Tensor | None = None
    y: Tensor | None = None


class Worker:
    """One rank's block and all that is under way there.

    Args:
        number: Of the block, from 0.
        last: The last block's.
        inside: A sample's shape where it comes in; None on the first block.
        outside: A sample's shape where it goes out; None on the last.
        kept: Stored X and U; None: each mini-batch begins with a forward pass and 0.
    """

    def __init__(
        self,
        number: int,
        last: int,
        problem: SubProblem,
        links: Neighbours,
        inside: torch.Size | None,
        outside: torch.Size | None,
        kept: Kept | None,
    ) -> None:
        self.number, self.last = number, last
        self.problem, self.links, self.kept = problem, links, kept
        self._inside, self._outside = inside, outside
        self.ticks = self.updates = 0
        self.forward_s = self.update_s = self.primal = self.dual = 0.0
        self.spans: list[Span] = []
        self._fed: dict[int, Fed] = {}
        self._visits: dict[int, Visit] = {}
        self._following: Tensor | None = None  # wires that leave in the next tick
        self._previous: Tensor | None = None

    def tick(self, fed: Fed | None) -> float | None:
        """One tick, with a new mini-batch or none; the last block's loss, if it has trained.

        If anything fails, the neighbours hear of it in their next tick.
        """
        with self.telling():
            self.spans = []
            if fed is not None:
                self._fed[self.ticks] = fed
            arriving, due = self.ticks - self.number, self.ticks - (2 * self.last - self.number)
            came = self.links.swap(self._following, self._previous, self._wanted(arriving, due))
            self._following = self._previous = None
            if arriving in self._fed:
                self._forward(arriving, came.get("activations"))
            term = self._update(due, came.get("targets")) if due in self._fed else None
            self.ticks += 1
            return term if self.number == self.last else None

    def trained(self) -> dict[str, Any]:
        """What is trained, and its optimiser."""
        problem = self.problem
        return {
            "layers": _copied(problem.layers.state_dict()),
            "proximal": {} if problem.proximal is None else _copied(problem.proximal.state_dict()),
            "optimizer": copy.deepcopy(problem.optimizer.state_dict()),
        }

    def put(self, trained: Mapping[str, Any]) -> None:
        """Load what `trained` gives."""
        problem = self.problem
        problem.layers.load_state_dict(trained["layers"])
        if problem.proximal is not None:
            problem.proximal.load_state_dict(trained["proximal"])
        problem.optimizer.load_state_dict(trained["optimizer"])

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, with what is under way."""
        return {
            "ticks": self.ticks,
            "updates": self.updates,
            "fed": {number: vars(each).copy() for number, each in self._fed.items()},
            "visits": {number: vars(each).copy() for number, each in self._visits.items()},
            "following": self._following,
            "previous": self._previous,
            **self.trained(),
            "kept": None if self.kept is None else self.kept.state_dict(),
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Load what is trained of a state that is not trusted, and check the rest of it.

        Raises `StateError`; then a part may be loaded.
        """
        try:
            if state.keys() != PARTS or not all(type(count) is int for count in _counts(state)):
                raise StateError(f"it has {arguments.shown(state)}")
            if self.kept is not None:
                self.kept.check(state["kept"])
            _under_way(state)
            self.put(state)
        except Exception as error:  # torch refuses with errors of many kinds
            raise StateError(
                f"the saved state is not of block {self.number + 1} as it is here, or is damaged: {error}"
            ) from error

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was taken."""
        if self.kept is not None:
            self.kept.load_state_dict(state["kept"])
        self.ticks, self.updates = _counts(state)
        self._fed, self._visits = _under_way(state)
        self._following, self._previous = state["following"], state["previous"]

    def _wanted(self, arriving: int, due: int) -> dict[str, torch.Size]:
        found = {}
        if self._inside is not None and arriving in self._fed:
            found["activations"] = torch.Size((self._fed[arriving].rows, *self._inside))
        if self._outside is not None and due in self._fed:
            found["targets"] = torch.Size((self._fed[due].rows, *self._outside))
        return found

    def _forward(self, number: int, f: Tensor | None) -> None:
        with self._timed("forward"):
            visit = self._arrived(number, f)
            self._visits[number] = visit
            out = None if self._outside is None else self.problem.forward(visit.x)
        if out is not None:
            self._following = self.links.encode("activations", out, number)

    def _arrived(self, number: int, f: Tensor | None) -> Visit:
        """X and U of a mini-batch: stored ones where there are, after a step of duals and penalty."""
        fed = self._fed[number]
        if f is None:
            assert fed.x is not None
            return Visit(number, fed.x)
        x = self.problem.feasible(f)
        if self.kept is None:
            return Visit(number, x, torch.zeros_like(f), f, x)
        assert fed.ids is not None
        known, old_x, old_u = self.kept.read(fed.ids, f)
        seen = known.view(-1, *[1] * (f.dim() - 1))
        u = torch.where(seen, old_u + self.problem.training.dual * (old_x - f), torch.zeros_like(f))
        nearer = self.problem.nearer(old_x, f, u)
        return Visit(number, torch.where(seen, nearer, x), u, f, torch.where(seen, old_x, x), fed.ids)

    def _update(self, number: int, target: Tensor | None) -> float:
        fed, visit = self._fed.pop(number), self._visits.pop(number)
        with self._timed("update"):
            target = fed.y if target is None else target
            assert target is not None
            solved = self.problem.solve(visit, target)
            if self.kept is not None and solved.x is not None and visit.u is not None:
                assert visit.ids is not None
                self.kept.write(visit.ids, solved.x, visit.u, number)
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
    def telling(self) -> Iterator[None]:
        """Around what may fail: the neighbours hear of it in their next tick, and wait no longer."""
        try:
            yield
        except Exception:
            with suppress(PeerError):  # it is gone too, and the first error says more
                self.links.give_up()
            raise


def _counts(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["ticks"], state["updates"]


def _under_way(state: Mapping[str, Any]) -> tuple[dict[int, Fed], dict[int, Visit]]:
    return (
        {number: Fed(**each) for number, each in state["fed"].items()},
        {number: Visit(**each) for number, each in state["visits"].items()},
    )


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}
