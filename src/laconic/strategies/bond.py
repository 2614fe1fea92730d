"""Bond: what ties one rank's model to those of the others, whether by its parameters or by its gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import PeerError
from laconic.strategies.alone import Alone
from laconic.strategies.circle import Circle
from laconic.strategies.handle import Handle
from laconic.strategies.replica import Replica
from laconic.strategies.state import FORMAT, Identity, RankState, label, model_digest, unlabel
from laconic.strategies.stats import Stats
from laconic.strategies.strategy import Notes, Strategy, Update

Statistics = Literal["average", "keep"]
MOST_CALLS = 1 << 20  # between two steps


class Bond(ABC):
    """One rank's tie to its group, as `DistributedOptimizer` uses it."""

    @abstractmethod
    def step(self, update: Update, loss: float | None) -> None:
        """One step of the optimiser, and of the strategy."""

    @abstractmethod
    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start."""

    @abstractmethod
    def notes(self) -> Notes:
        """What there is to tell of the last step."""

    @abstractmethod
    def averaged(self) -> AbstractContextManager[float]:
        """Inside, the model is the group's; gives how far ranks were from it. Called by all ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Every rank takes the group's model. Called by all ranks."""

    @abstractmethod
    def state_dict(self) -> RankState:
        """This rank's memory. Called by all ranks, after the same step."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `StateError` for another's."""

    @abstractmethod
    def remove(self) -> None:
        """Untie: an ordinary model and optimiser are left."""


class GradientBond(Bond):
    """Replicas that are always equal, because they take the same mean gradient."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def step(self, update: Update, loss: float | None) -> None:
        update()

    def stats(self) -> Stats:
        return self.handle.stats()

    def notes(self) -> Notes:
        return {}

    def averaged(self) -> AbstractContextManager[float]:
        return nullcontext(0.0)

    def finish(self) -> None:
        """Replicas are equal."""

    def state_dict(self) -> RankState:
        return self.handle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.handle.load_state_dict(state)

    def remove(self) -> None:
        self.handle.remove()


class ParameterBond(Bond):
    """A strategy at work in a circle of ranks. Where the circle outlasts a loss, so does this.

    When a rank is lost, the others meet in a new circle, wherever in their training each of them is. All take
    the exact average of their models, which have their last updates. Who was in a step is done with it, and
    counts as many steps as the one who had most. What all do together between steps, such as `finish`, is
    done again, unless one of them has come further: then the average stands for it.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Replica,
        optimizer: Optimizer,
        circle: Circle,
        *,
        seed: int,
        statistics: Statistics,
    ) -> None:
        self.strategy = strategy
        self.replica = replica
        self.circle = circle
        self._optimizer = optimizer
        self._seed = seed
        self._statistics = statistics
        self.removed = False
        self._untrained = False  # whether nobody had a model of the training when the circle was made anew
        self._calls = 0  # what all do together, since the last step
        self._furthest = (0, 0)  # steps and calls of the one who was ahead when the circle was made anew
        if circle.late:
            self._come_back()
        else:
            self.bound = strategy.bind(replica, optimizer, circle.own, seed)
        circle.own.reset()

    def _come_back(self) -> None:
        """In the place of a process that died: take the others' average at their next step."""
        self.bound = Alone().bind(self.replica, self._optimizer, self.circle.own, self._seed)
        self._regroup(0, whole=False)
        if self._untrained:
            raise PeerError(
                "this rank has come back, and no other is left whose model it could take: the training has"
                " ended, or begin it anew from a checkpoint"
            )

    def step(self, update: Update, loss: float | None) -> None:
        self.replica.check_views()
        self._calls = 0
        if self.circle.called:
            update()
            self._regroup(self.bound.steps + 1)
        elif self._fails(lambda: self.bound.step(update, loss)):
            self._regroup(self.bound.steps + 1)

    def _together(self, act: Callable[[], object], last: bool = False) -> None:
        """Do what all do between steps. `last`: it ends the training, and is done however far others are."""
        self._calls += 1
        while (self.bound.steps, self._calls) >= self._furthest and self._fails(act):
            steps = self.bound.steps
            self._regroup(steps)
            if self.bound.steps > steps:
                self._calls = int(last)
                if not last:
                    return

    def _fails(self, act: Callable[[], object]) -> bool:
        """Whether a rank is lost in doing this. All that holds the old group by its error is gone then."""
        try:
            act()
        except PeerError:
            if self.circle.roster is None:
                raise
            return True
        return False

    def _regroup(self, steps: int, whole: bool = True) -> None:
        """All who live begin anew at the average of their models, after as many steps as any has done.

        `whole`: this rank has a model of the training.
        """
        model, began = self.bound.salvage().clone(), self.circle.generation
        dense_bytes, seconds = self.bound.dense_bytes, self.bound.seconds
        self.bound.abandon()
        self.bound = Alone().bind(self.replica, self._optimizer, self.circle.own, self._seed)  # drop the old
        while True:
            self.circle.renew()
            with suppress(PeerError):  # another loss, in this very meeting: meet again
                present = self.circle.generation == began + 1
                self._furthest = self._average_(model, steps, [whole and present, whole, True])
                own = self.circle.own
                chosen = Alone() if own.size == 1 else self.strategy
                chosen.check_left(own.size, self._optimizer)
                self.bound = chosen.bind(self.replica, self._optimizer, own, self._seed)
                break
        self.bound.steps, self.bound.dense_bytes, self.bound.seconds = self._furthest[0], dense_bytes, seconds

    def _average_(self, model: Tensor, steps: int, counts: list[bool]) -> tuple[int, int]:
        """The replica becomes the mean of the models; the most steps, and the most calls of who did these.

        `counts`: whether this rank has missed no circle, has a model of the training, is here. The first of
        these that any rank can say decides whose models make the mean.
        """
        aside = self.circle.aside
        totals = aside.all_reduce(torch.tensor(counts, dtype=torch.float64)).tolist()
        level = next(level for level, total in enumerate(totals) if total)
        weight, count = float(counts[level]), totals[level]
        self._untrained = level == len(counts) - 1
        mean = aside.all_reduce(model * weight).div_(count)
        furthest = aside.all_reduce(torch.tensor([steps * MOST_CALLS + self._calls]), "max")
        for each in self.replica.statistics:
            each.copy_(aside.all_reduce(each * weight) / count)  # whole, or as it was
        self.replica.flat.copy_(mean)
        return divmod(int(furthest), MOST_CALLS)

    def stats(self) -> Stats:
        meter = self.bound.comm.snapshot()
        seconds = replace(self.bound.seconds, communicate_s=meter.seconds)
        return Stats.of(meter, seconds, steps=self.bound.steps, dense=self.bound.dense_bytes)

    def notes(self) -> Notes:
        living = {} if self.circle.roster is None else {"living": [*self.circle.roster.members]}
        return self.bound.notes() | living

    @contextmanager
    def averaged(self) -> Iterator[float]:
        kept: list[Tensor] = []
        distance = 0.0

        def show() -> None:
            nonlocal kept, distance
            model = self.bound.consensus(self.circle.aside)
            distance = self._distance(model)
            own = [each.clone() for each in (self.replica.flat, *self.replica.statistics)]
            self._take(model)
            kept = own

        self._together(show)
        try:
            yield distance
        finally:
            for each, own in zip((self.replica.flat, *self.replica.statistics), kept, strict=bool(kept)):
                each.copy_(own)

    def finish(self) -> None:
        self._together(self._finish, last=True)

    def _finish(self) -> None:
        self.bound.settle(self.circle.aside)
        model = self.bound.consensus(self.circle.aside)
        self.bound.adopt_(model)
        self._take(model)

    def _take(self, model: Tensor) -> None:
        self.replica.flat.copy_(model)
        if self._statistics == "average":
            self.replica.mean_statistics_(self.circle.aside)

    def _distance(self, model: Tensor) -> float:
        """Root mean square over ranks of |x_r - model|, over |model|."""
        apart = torch.dist(self.replica.flat, model).double().square().view(1)
        mean = float(self.circle.aside.all_reduce(apart)) / self.circle.aside.size
        return math.sqrt(mean) / (float(model.norm()) or 1.0)

    def state_dict(self) -> RankState:
        self._together(lambda: self.bound.settle(self.circle.aside))
        tensors = {"flat": self.replica.flat} | self.bound.state_dict()
        copies = {key: value.clone() for key, value in tensors.items()}
        return RankState(
            **self._identity(), step=self.bound.steps, tensors=label(copies, self.bound.comm.rank)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tensors = unlabel(state, self._identity())
        flat = tensors.pop("flat")
        self.bound.check_state(tensors)
        self.bound.load_state_dict(tensors, int(state["step"]))
        self.replica.flat.copy_(flat)
        self._furthest = (0, 0)

    def _identity(self) -> Identity:
        return Identity(
            format=FORMAT,
            spec=repr(self.strategy),
            model=model_digest(self.replica.layout),
            rank=self.bound.comm.rank,
            size=self.bound.comm.size,
            seed=self._seed,
        )

    def remove(self) -> None:
        self._together(lambda: self.bound.settle(self.circle.aside), last=True)
        self.bound.close()
        self.replica.release()
        self.circle.close()
        self.removed = True
