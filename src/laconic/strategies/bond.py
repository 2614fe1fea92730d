"""Bond: what ties one rank's model to those of the others, whether by its parameters or by its gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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

    When a rank is lost, the others meet in a new circle; each has taken its update, and all take the exact
    average of their models in place of what has failed, and count as many steps as the one who had most.
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
        self.bound = strategy.bind(replica, optimizer, circle.own, seed)
        circle.own.reset()

    def step(self, update: Update, loss: float | None) -> None:
        self.replica.check_views()
        if self.circle.called:
            self._regroup(self.bound.steps)
        with self._outlasting(steps=self.bound.steps + 1):
            self.bound.step(update, loss)

    @contextmanager
    def _outlasting(self, steps: int) -> Iterator[None]:
        """Where a rank is lost inside, the average of the others stands for what was to be done."""
        try:
            yield
        except PeerError:
            if self.circle.roster is None:
                raise
            self._regroup(steps)

    def _regroup(self, steps: int) -> None:
        """All who live begin anew at the average of their models, after as many steps as any has done."""
        old, model, began = self.bound, self.bound.salvage().clone(), self.circle.generation
        old.abandon()
        while True:
            self.circle.renew()
            with suppress(PeerError):  # another loss, in this very meeting: meet again
                steps = self._average_(model, steps, whole=self.circle.generation == began + 1)
                break
        alone = self.circle.own.size == 1
        chosen = Alone() if alone else self.strategy
        chosen.check(self.circle.own.size, self._optimizer)
        self.bound = chosen.bind(self.replica, self._optimizer, self.circle.own, self._seed)
        self.bound.steps, self.bound.dense_bytes = steps, old.dense_bytes
        self.bound.seconds = old.seconds

    def _average_(self, model: Tensor, steps: int, whole: bool) -> int:
        """The replica becomes the mean of the models; the most steps. `whole`: this rank missed no circle."""
        aside = self.circle.aside
        weight = float(whole)
        count = aside.all_reduce(torch.tensor([weight, 1.0], dtype=torch.float64))
        if count[0] == 0:  # all have missed one: then all count
            weight, count = 1.0, count.flip(0)
        mean = aside.all_reduce(model * weight).div_(float(count[0]))
        most = int(aside.all_reduce(torch.tensor([steps]), "max"))
        for each in self.replica.statistics:
            each.copy_(aside.all_reduce(each * weight) / float(count[0]))  # whole, or as it was
        self.replica.flat.copy_(mean)
        return most

    def stats(self) -> Stats:
        meter, seconds = self.bound.comm.snapshot(), self.bound.seconds
        return Stats(
            steps=self.bound.steps,
            payload_sent=meter.payload_sent,
            payload_received=meter.payload_received,
            wire_sent=meter.wire_sent,
            wire_received=meter.wire_received,
            dense=self.bound.dense_bytes,
            encode_s=seconds.encode_s,
            communicate_s=meter.seconds,
            decode_s=seconds.decode_s,
            phases={" ".join(key).strip(): part.payload_sent for key, part in meter.parts.items()},
        )

    def notes(self) -> Notes:
        living = {} if self.circle.roster is None else {"living": [*self.circle.roster.members]}
        return self.bound.notes() | living

    @contextmanager
    def averaged(self) -> Iterator[float]:
        kept, distance = [], 0.0
        with self._outlasting(self.bound.steps):
            model = self.bound.consensus(self.circle.aside)
            distance = self._distance(model)
            kept = [each.clone() for each in (self.replica.flat, *self.replica.statistics)]
            self._take(model)
        try:
            yield distance
        finally:
            for each, own in zip((self.replica.flat, *self.replica.statistics), kept, strict=bool(kept)):
                each.copy_(own)

    def finish(self) -> None:
        with self._outlasting(self.bound.steps):
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
        with self._outlasting(self.bound.steps):
            self.bound.settle(self.circle.aside)
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
        with self._outlasting(self.bound.steps):
            self.bound.settle(self.circle.aside)
        self.bound.close()
        self.replica.release()
        self.circle.close()
        self.removed = True
