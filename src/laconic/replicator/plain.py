"""Plain: controller of a single replica."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from laconic.comm.metered import Meter
from laconic.core.errors import NonFiniteError
from laconic.exchange.gathered import GatheredState, own_part
from laconic.exchange.state import FORMAT, RankState
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds
from laconic.replicator.stats import ReplicatorStats
from laconic.strategies.controller import Controller
from laconic.strategies.gradients import all_finite, gradients
from laconic.strategies.strategy import Notes, Update


class Plain(Controller):
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.steps = optimizer, 0

    def step(self, update: Update, loss: float | None) -> None:
        if not all_finite(gradients(self._optimizer)):
            raise NonFiniteError(
                "a gradient is NaN or infinite: nothing was changed; call optimizer.zero_grad() and continue,"
                " or lower the learning rate"
            )
        update()
        self.steps += 1

    def stats(self) -> ReplicatorStats:
        return ReplicatorStats.over(Stats.of(Meter(), Seconds(), steps=self.steps, dense=0))

    def notes(self) -> Notes:
        return {}

    def averaged(self) -> AbstractContextManager[float]:
        return nullcontext(0.0)

    def finish(self) -> None:
        """Do nothing."""

    @property
    def rank(self) -> int:
        return 0

    def state_dict(self) -> RankState:
        return RankState(
            format=FORMAT, spec="single()", model="", rank=0, size=1, seed=0, step=self.steps, tensors={}
        )

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        return GatheredState(format=FORMAT, ranks=[self.state_dict()]), [optimiser]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(own_part(state, 0, 1)["step"])

    def discard(self) -> None:
        """Do nothing."""

    def remove(self) -> None:
        """Do nothing."""
