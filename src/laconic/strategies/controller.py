"""Controller: synchronises replicas by gradients or by parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.ddp.handle import Handle
from laconic.exchange.gathered import GatheredState, gathered
from laconic.exchange.state import RankState
from laconic.exchange.stats import Stats
from laconic.strategies.strategy import Notes, Update


class Controller(ABC):
    """Connection of one rank to its group."""

    shares_gradients = False  # a rank without inputs gets a gradient too
    mixes_scales = False  # GradScalers of the ranks may differ

    @abstractmethod
    def step(self, update: Update, loss: float | None) -> None:
        """Run one step."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return bytes and seconds."""

    @abstractmethod
    def notes(self) -> Notes:
        """Return details of the last step."""

    @abstractmethod
    def averaged(self) -> AbstractContextManager[float]:
        """Load the group's model within a context; yields the ranks' distance to it. Called by all."""

    @abstractmethod
    def finish(self) -> None:
        """Load the group's model. Called by all."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this rank in its group."""

    @abstractmethod
    def state_dict(self) -> RankState:
        """Return this rank's memory. Called by all, after the same step."""

    @abstractmethod
    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        """Gather memories and optimiser states on rank 0; of equal replicas, only rank 0's."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state or its part of `gathered`. Raises `StateError`. Called by all."""

    @abstractmethod
    def discard(self) -> None:
        """Drop residuals. Called by all."""

    @abstractmethod
    def remove(self) -> None:
        """Detach this rank."""


@contextmanager
def averaged(parameters: Sequence[Tensor], comm: Comm) -> Iterator[float]:
    with torch.no_grad():
        own = [each.detach().clone() for each in parameters]
        means = [comm.all_reduce(each.float().contiguous() / comm.size) for each in own]
        apart, norm = (
            sum(float(x.double().square().sum()) for x in tensors)
            for tensors in ([mean - each.float() for mean, each in zip(means, own, strict=True)], means)
        )
        total = float(comm.all_reduce(torch.tensor([apart], dtype=torch.float64, device="cpu")))
        for each, mean in zip(parameters, means, strict=True):
            each.copy_(mean)
    try:
        yield math.sqrt(total / comm.size / (norm or 1.0))
    finally:
        with torch.no_grad():
            for each, before in zip(parameters, own, strict=True):
                each.copy_(before)


class GradientController(Controller):
    def __init__(self, handle: Handle, parameters: Iterable[Tensor]) -> None:
        self.handle, self._parameters = handle, tuple(parameters)

    def __repr__(self) -> str:
        return repr(self.handle)

    def step(self, update: Update, loss: float | None) -> None:
        update()

    def stats(self) -> Stats:
        return self.handle.stats()

    def notes(self) -> Notes:
        return {}

    def averaged(self) -> AbstractContextManager[float]:
        if self.handle.method.keeps_equal:
            return nullcontext(0.0)
        self.handle.call_jointly("averaged()")
        return averaged(self._parameters, self.handle.exchange.comm.comm)

    def finish(self) -> None:
        self.handle.synchronize()

    @property
    def rank(self) -> int:
        return self.handle.exchange.comm.rank

    def state_dict(self) -> RankState:
        return self.handle.state_dict()

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        comm = self.handle.exchange.comm.comm
        if self.handle.method.keeps_equal:
            optimisers = [] if comm.rank else [optimiser]
        else:
            self.handle.call_jointly("state_dict(gather=True)")
            optimisers = gathered(optimiser, comm)
        return self.handle.state_dict(gather=True), optimisers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.handle.load_state_dict(state)

    def discard(self) -> None:
        self.handle.discard()

    def remove(self) -> None:
        self.handle.remove()
