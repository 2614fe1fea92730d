"""By machine: the ranks of a machine train as one, and their first follows a strategy with those of others.

    g = mean of g_i over the machine;  the first rank takes the strategy's step by g;  others take its model

Inside a machine links are fast: there gradients are dense, and replicas equal. Between machines any strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.mesh import machines
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.strategies.alone import Alone
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class ByMachine(Strategy):
    """`strategy` between the first ranks of machines. `local`: how many ranks in a row share one.

    0 asks what torchrun has told each rank. Wire, a step: 2 (m - 1) / m of the gradient and once the
    parameters, in float32, inside a machine of m ranks; between machines what `strategy` sends.
    """

    strategy: Strategy
    local: int = 0

    name: ClassVar[str] = "by_machine"
    examples: ClassVar[tuple[str, ...]] = ("by_machine(local_sgd(every=4), local=2)",)

    def __post_init__(self) -> None:
        arguments.piece("by_machine", self.strategy, Strategy, "sgp()")
        arguments.whole("by_machine: local", self.local)
        if isinstance(self.strategy, ByMachine):
            raise SpecError("by_machine has two levels: it takes no by_machine inside")

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if self.local and size % self.local:
            raise SpecError(f"by_machine: local={self.local} does not divide the {size} ranks of this group")
        if self.local:
            self.strategy.check(size // self.local, optimizer)

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """What is left of machines is known when all are bound: the strategy between them is checked then."""

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundByMachine:
        return BoundByMachine(self, replica, optimizer, comm, seed)


class BoundByMachine(BoundStrategy):
    """By machine at work on one rank: `led` is the strategy, on the first rank of each machine."""

    def __init__(
        self, config: ByMachine, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        super().__init__(replica, comm)
        numbers = machines(comm, config.local)
        left = len(set(numbers))
        strategy = Alone() if left == 1 and comm.size < comm.began else config.strategy
        strategy.check(left, optimizer)
        self._inside = comm.split(numbers[comm.rank])
        leads = self._inside.rank == 0
        between = comm.split(0 if leads else 1)
        self._beside = comm.split(0 if leads else 1)
        self.led = strategy.bind(replica, optimizer, between, seed) if leads else None
        self._gradient = torch.zeros_like(replica.flat)

    def step_(self, update: Update, loss: float | None) -> None:
        finite = self._mean_gradient()
        if self.led is not None:
            self.led.step(update if finite else _nothing, loss)
        self._follow(self.replica.flat)

    def _mean_gradient(self) -> bool:
        """Every parameter gets the mean gradient of the machine; False where that is not finite."""
        with self.comm.phase("inside a machine"):
            views = self.replica.views(self._gradient)
            for name, parameter in self.replica.parameters.items():
                if parameter.grad is None:
                    views[name].zero_()
                else:
                    views[name].copy_(parameter.grad)
            self._inside.all_reduce(self._gradient).div_(self._inside.size)
            for name, parameter in self.replica.parameters.items():
                if parameter.grad is not None:
                    parameter.grad.copy_(views[name])
        return kernels.all_finite(self._gradient, self.replica.layout.segments)

    def _follow(self, x: Tensor) -> Tensor:
        """The first rank's x for all of its machine."""
        with self.comm.phase("inside a machine"):
            return self._inside.broadcast(x)

    def settle(self, aside: Comm) -> None:
        if self.led is not None:
            self.led.settle(self._beside)
        self._follow(self.replica.flat)

    def consensus(self, aside: Comm) -> Tensor:
        if self.led is None:
            return self._follow(torch.empty_like(self.replica.flat))
        return self._follow(self.led.consensus(self._beside))

    def salvage(self) -> Tensor:
        return self.replica.flat if self.led is None else self.led.salvage()

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        if self.led is not None:
            self.led.adopt_(model)

    def notes(self) -> Notes:
        return {} if self.led is None else self.led.notes()

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.led is None else self.led.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        if self.led is not None:
            self.led.load_state_dict(state, steps)
        self.steps = steps

    def close(self) -> None:
        if self.led is not None:
            self.led.close()

    def abandon(self) -> None:
        if self.led is not None:
            self.led.abandon()


def _nothing() -> None:
    """The update of a step that the whole machine skips."""
