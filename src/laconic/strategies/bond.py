"""Bond: what ties one rank's model to those of the others, whether by its parameters or by its gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.strategies.handle import Handle
from laconic.strategies.state import FORMAT, Identity, RankState, label, model_digest, unlabel
from laconic.strategies.stats import Stats
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update

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
    """A strategy at work, with a group beside its own for what is asked between steps."""

    def __init__(
        self,
        strategy: Strategy,
        bound: BoundStrategy,
        aside: Comm,
        *,
        seed: int,
        statistics: Statistics,
        close: Callable[[], None],
    ) -> None:
        self.strategy = strategy
        self.bound = bound
        self.replica = bound.replica
        self._aside = aside
        self._seed = seed
        self._statistics = statistics
        self._close = close

    def step(self, update: Update, loss: float | None) -> None:
        self.bound.step(update, loss)

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
        return self.bound.notes()

    @contextmanager
    def averaged(self) -> Iterator[float]:
        self.bound.settle(self._aside)
        model = self.bound.consensus(self._aside)
        kept = [each.clone() for each in (self.replica.flat, *self.replica.statistics)]
        distance = self._distance(model)
        self._take(model)
        try:
            yield distance
        finally:
            for each, own in zip((self.replica.flat, *self.replica.statistics), kept, strict=True):
                each.copy_(own)

    def finish(self) -> None:
        self.bound.settle(self._aside)
        model = self.bound.consensus(self._aside)
        self.bound.adopt_(model)
        self._take(model)

    def _take(self, model: Tensor) -> None:
        self.replica.flat.copy_(model)
        if self._statistics == "average":
            self.replica.mean_statistics_(self._aside)

    def _distance(self, model: Tensor) -> float:
        """Root mean square over ranks of |x_r - model|, over |model|."""
        apart = torch.dist(self.replica.flat, model).double().square().view(1)
        mean = float(self._aside.all_reduce(apart)) / self._aside.size
        return math.sqrt(mean) / (float(model.norm()) or 1.0)

    def state_dict(self) -> RankState:
        self.bound.settle(self._aside)
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
        self.bound.settle(self._aside)
        self.bound.close()
        self.replica.release()
        self._close()
