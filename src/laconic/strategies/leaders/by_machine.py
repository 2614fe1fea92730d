"""By machine: ranks of a machine train as one; the first ranks of the machines follow a strategy.

    g = mean of g_i over the machine;  the first rank runs the strategy's step with g;  others copy its model

All ranks of a machine update their optimiser with g, so that any can replace the first one.
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
from laconic.core.spec import Status
from laconic.strategies.alone import Alone
from laconic.strategies.replica import Replica
from laconic.strategies.rounds import nothing
from laconic.strategies.several import each_of
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class ByMachine(Strategy):
    """Strategy between machines, with dense gradients inside them.

    Wire, per step inside a machine of m ranks: 2 (m - 1) / m times the gradient, and once the parameters, in
    float32. Between machines: that of `strategy`. The next rank of its machine replaces a lost first rank,
    with the memory that is equal on all first ranks, but without `slowmo`'s changes of the optimiser.

    Args:
        strategy: The strategy between the first ranks of machines, such as sgp().
        ranks_per_node: Consecutive ranks per machine; default: 0, the value that torchrun sets.

    Raises:
        SpecError: An argument is outside its range, or `strategy` is by_machine.
    """

    status: ClassVar[Status] = "own"

    strategy: Strategy
    ranks_per_node: int = 0

    name: ClassVar[str] = "by_machine"
    examples: ClassVar[tuple[str, ...]] = ("by_machine(local_sgd(every=4), ranks_per_node=2)",)

    def __post_init__(self) -> None:
        arguments.piece("by_machine", self.strategy, Strategy, "sgp()")
        arguments.whole("by_machine: ranks_per_node", self.ranks_per_node)
        if isinstance(self.strategy, ByMachine):
            raise SpecError("by_machine cannot contain by_machine: use another strategy inside")

    @property
    def shares_gradients(self) -> bool:
        return True

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if self.ranks_per_node and size % self.ranks_per_node:
            raise SpecError(
                f"by_machine: ranks_per_node={self.ranks_per_node} does not divide the {size} ranks: set it"
                " to the number of ranks per machine"
            )
        if self.ranks_per_node:
            self.strategy.check(size // self.ranks_per_node, optimizer)

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """Do nothing: `bind` checks the remaining machines."""

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundByMachine:
        return BoundByMachine(self, replica, optimizer, comm, seed)


class BoundByMachine(BoundStrategy):
    def __init__(
        self, config: ByMachine, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        super().__init__(replica, comm)
        numbers = machines(comm, config.ranks_per_node)
        left = len(set(numbers))
        strategy = Alone() if left == 1 and comm.size < comm.original_size else config.strategy
        for each in each_of(optimizer):
            strategy.check(left, each)
        self._inside = comm.split(numbers[comm.rank])
        leads = self._inside.rank == 0
        between = comm.split(0 if leads else 1)
        self._beside = comm.split(0 if leads else 1)
        self.led = strategy.bind(replica, optimizer, between, seed) if leads else None
        self._gradient = torch.zeros_like(replica.flat)

    def step_(self, update: Update, loss: float | None) -> None:
        finite = self._mean_gradient()
        if self.led is not None:
            self.led.step(update if finite else nothing, loss)
        elif finite:
            update()  # for the optimiser's state
        self._follow(self.replica.flat)

    def _mean_gradient(self) -> bool:
        with self.comm.phase("inside a machine"):
            views = self.replica.views(self._gradient)
            for name, parameter in self.replica.parameters.items():
                if parameter.grad is None:
                    views[name].zero_()
                else:
                    grad = parameter.grad
                    views[name].copy_(grad.to_dense() if grad.is_sparse else grad)
            self._inside.all_reduce(self._gradient).div_(self._inside.size)
            for name, parameter in self.replica.parameters.items():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = views[name].to_sparse(parameter.grad.sparse_dim())
                elif parameter.grad is not None:
                    parameter.grad.copy_(views[name])
                elif bool(views[name].any()):  # another rank used it
                    parameter.grad = views[name].to(parameter.dtype, copy=True)
        return kernels.all_finite(self._gradient, self.replica.layout.segments)

    def _follow(self, x: Tensor) -> Tensor:
        with self.comm.phase("inside a machine"):
            return self._inside.broadcast(x)

    def drain(self, side_comm: Comm) -> None:
        if self.led is not None:
            self.led.drain(self._beside)
        self._follow(self.replica.flat)

    def consensus(self, side_comm: Comm) -> Tensor:
        if self.led is None:
            return self._follow(torch.empty_like(self.replica.flat))
        return self._follow(self.led.consensus(self._beside))

    def salvage(self) -> Tensor:
        return self.replica.flat if self.led is None else self.led.salvage()

    def agreed(self) -> dict[str, Tensor]:
        return {} if self.led is None else self.led.agreed()

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
