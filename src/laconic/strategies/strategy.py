"""Strategy: who talks to whom, and when. What one exchanges is parameters, between an optimiser's steps.

A `Strategy` is configuration: a frozen dataclass that a spec string names. `bind` gives the working object on
one rank, which owns all state and calls the optimiser's step where the strategy wants it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError
from laconic.core.spec import Spec
from laconic.strategies.replica import Replica
from laconic.strategies.state import check_shapes
from laconic.strategies.stats import Seconds

Update = Callable[[], Any]  # the optimiser's own step
Notes = dict[str, Any]  # plain numbers and lists, for a line of events.jsonl


class Strategy(Spec):
    """Base of every strategy that keeps replicas together by their parameters."""

    @property
    def owns_momentum(self) -> bool:
        """Whether it keeps the momentum, or a strategy in it does: the optimiser is then SGD without."""
        inside = (getattr(self, each.name) for each in fields(cast(Any, self)))
        return any(each.owns_momentum for each in inside if isinstance(each, Strategy))

    def check(self, size: int, optimizer: Optimizer) -> None:
        """Raise `SpecError` or `AttachError` where this many ranks, or this optimiser, will not do."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise AttachError(
                f"{self!r} exchanges parameters between steps, and LBFGS evaluates the model many times in"
                " one: take SGD, Adam or another optimiser of one gradient a step"
            )

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """`check`, where others have been lost, and machines may have lost some of their ranks."""
        self.check(size, optimizer)

    @abstractmethod
    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundStrategy:
        """The working object for this rank's model. Called by all ranks; may be collective."""


class BoundStrategy(ABC):
    """A strategy at work on one rank. Every rank makes the same calls, though not at the same time.

    `dense_bytes`: what an all-reduce of float32 gradients would have handed over until now.
    """

    def __init__(self, replica: Replica, comm: Metered) -> None:
        self.replica = replica
        self.comm = comm
        self.steps = 0
        self.dense_bytes = 0
        self.seconds = Seconds()  # of encoding and decoding; `comm` counts those of communication

    def step(self, update: Update, loss: float | None = None) -> None:
        """One step: `update()` changes the parameters by this rank's gradient, and ranks talk."""
        self.step_(update, loss)
        self.steps += 1
        self.dense_bytes += self.replica.flat.nbytes

    @abstractmethod
    def step_(self, update: Update, loss: float | None) -> None:
        """What `step` does; `loss` is this rank's, where the script has told it."""

    def settle(self, aside: Comm) -> None:
        """Finish what is under way, so that nothing travels. Called by all ranks after as many steps each.

        `aside`: a group of the same ranks, on which nothing is under way.
        """
        return

    def consensus(self, aside: Comm) -> Tensor:
        """The group's model, float32 (n,), the same on all ranks: here the mean. Called by all ranks.

        It has what is under way too, and leaves all as it is.
        """
        return aside.all_reduce(self.replica.flat.clone()).div_(aside.size)

    def salvage(self) -> Tensor:
        """This rank's own model, float32 (n,), after its last `step` has failed half-way."""
        return self.replica.flat

    def adopt_(self, model: Tensor) -> None:
        """Every rank now has this model, float32 (n,)."""
        self.replica.flat.copy_(model)

    def notes(self) -> Notes:
        """What there is to tell of the last step, such as weights and peers."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Memory of this rank, "<kind>" to a tensor, settled."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `StateError` unless the state has exactly the tensors of this strategy's memory."""
        check_shapes(self.state_dict(), state, "strategy")

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Take memory back, after `check_state`."""
        for key, value in self.state_dict().items():
            value.copy_(state[key])
        self.steps = steps

    def close(self) -> None:
        """End threads, in agreement with the other ranks. Called by all, settled."""
        return

    def abandon(self) -> None:
        """End threads, or let them end, of a group that has broken."""
        self.close()
