"""Strategy: configuration of which ranks exchange parameters, and when; `bind` makes it work on a rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core.spec import Spec
from laconic.exchange.state import check_shapes
from laconic.exchange.stopwatch import Seconds
from laconic.optim.closure import refuse_lbfgs
from laconic.strategies.replica import Replica

Update = Callable[[], Any]
Notes = dict[str, Any]  # plain numbers and lists, as JSON in events.jsonl


class Strategy(Spec):
    """Base of all strategies."""

    @property
    def parts(self) -> tuple[Strategy, ...]:
        values = (getattr(self, each.name) for each in fields(cast(Any, self)))
        return tuple(value for value in values if isinstance(value, Strategy))

    @property
    def owns_momentum(self) -> bool:
        """Whether it has the momentum: the optimiser is then plain SGD."""
        return any(part.owns_momentum for part in self.parts)

    @property
    def period(self) -> int:
        """Steps after which its pattern repeats."""
        return math.lcm(*(part.period for part in self.parts))

    @property
    def meets(self) -> bool:
        """Whether all ranks have the same model, bit for bit, after every `period` steps."""
        return any(part.meets for part in self.parts)

    @property
    def keeps_mean(self) -> bool:
        """Whether communication preserves the mean of models, up to rounding."""
        return False

    @property
    def clocked(self) -> bool:
        """Whether communication depends on timing, so that no two runs are equal."""
        return any(part.clocked for part in self.parts)

    @property
    def counts_together(self) -> bool:
        """Whether ranks count steps together: their numbers may differ."""
        return self.clocked and not self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether messages are sent during computation."""
        return any(part.overlaps for part in self.parts)

    @property
    def shares_gradients(self) -> bool:
        """Whether a rank without a gradient updates its model with those of others."""
        return any(part.shares_gradients for part in self.parts)

    def check(self, size: int, optimizer: Optimizer) -> None:
        refuse_lbfgs(optimizer, repr(self))

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """Run `check` after ranks were lost; machines may then have different numbers of ranks."""
        self.check(size, optimizer)

    @abstractmethod
    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundStrategy:
        """Return this rank's working object. Called by all ranks."""


class BoundStrategy(ABC):
    """Strategy on one rank. Every rank makes the same calls.

    `dense_bytes`: bytes that all-reduces of float32 gradients would have sent so far.
    """

    def __init__(self, replica: Replica, comm: Metered) -> None:
        self.replica = replica
        self.comm = comm
        self.steps = 0
        self.dense_bytes = 0
        self.seconds = Seconds()  # without communication

    def step(self, update: Update, loss: float | None = None) -> None:
        """Run one step: `update()` applies this rank's gradient."""
        self.step_(update, loss)
        self.steps += 1
        self.dense_bytes += self.comm.dense_sent(self.replica.flat.nbytes)

    @abstractmethod
    def step_(self, update: Update, loss: float | None) -> None:
        """Implement `step`. `loss`: None if the script has not recorded it."""

    def drain(self, side_comm: Comm) -> None:
        """Complete pending messages. Called by all ranks, after the same number of steps.

        `side_comm`: a group of the same ranks, in which no message is pending.
        """
        return

    def consensus(self, side_comm: Comm) -> Tensor:
        """Return the group's model, float32 (n,), equal on all ranks: here the mean. Called by all ranks.

        Includes pending messages, and changes nothing.
        """
        return side_comm.mean_(self.replica.flat.clone())

    def salvage(self) -> Tensor:
        """Return this rank's model, float32 (n,), after its last `step` failed halfway."""
        return self.replica.flat

    def agreed(self) -> dict[str, Tensor]:
        """Return the memory that is equal on all ranks: a new group keeps it."""
        return {}

    def adopt_(self, model: Tensor) -> None:
        """Load this model, float32 (n,), which every rank now has."""
        self.replica.flat.copy_(model)

    def notes(self) -> Notes:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's memory by name, after `drain`."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        check_shapes(self.state_dict(), state, "strategy")

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        for key, value in self.state_dict().items():
            value.copy_(state[key])
        self.steps = steps

    def close(self) -> None:
        """End threads, in agreement with the other ranks. Called by all, after `drain`."""
        return

    def abandon(self) -> None:
        """End the threads of a broken group."""
        self.close()
