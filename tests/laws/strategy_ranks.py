"""A small world for laws of strategies: threads as ranks, each with an optimiser as `distribute` makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.comm.joint_calls import unwatched
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import LaconicError
from laconic.core.spec import parse
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.parameter_controller import ParameterController
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Strategy
from tests.unit.strategy_world import Numbers, gradient, sgd

T = TypeVar("T")


@dataclass
class Together:
    """A membership that nobody leaves."""

    exchanging = staticmethod(unwatched)

    comm: Metered
    side_comm: Loopback
    heartbeats: None = None
    joint_calls: None = None
    rejoining: bool = False
    regroup_requested: bool = False
    finishing: tuple[int, ...] = ()
    waited: bool = False

    def close(self) -> None:
        """Groups of threads need no end."""


@dataclass
class Rank:
    """One rank of a group at work by a strategy.

    `lr`: of a plain SGD, with momentum where the strategy has none of its own.
    """

    spec: str
    comm: Loopback
    lr: float = 0.1
    model: Numbers = field(init=False)
    replica: Replica = field(init=False)
    controller: ParameterController = field(init=False)
    optimizer: DistributedOptimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model, strategy = Numbers(), parse(self.spec)
        plain = sgd(self.model, (self.lr, self.lr), momentum=0.0 if strategy.owns_momentum else 0.9)
        self.replica = Replica(self.model, plain)
        strategy.check(self.comm.size, plain)
        self.replica.flatten()
        together: Any = Together(Metered(self.comm.split(0)), self.comm.split(0))
        self.controller = ParameterController(
            strategy, self.replica, plain, together, seed=3, statistics="average"
        )
        self.optimizer = DistributedOptimizer(plain, self.controller)

    @property
    def flat(self) -> Tensor:
        """A copy of this rank's parameters, float32 (N,)."""
        return self.replica.flat.clone()

    def give(self, step: int) -> None:
        """This rank's gradient of a step, and its loss."""
        slope = gradient(self.replica.flat, self.comm.rank, step)
        for name, grad in self.replica.views(slope).items():
            self.replica.parameters[name].grad = grad
        self.optimizer.note_loss(float(slope.norm()))

    def spoil(self) -> None:
        """One entry of the gradient overflows."""
        grad = self.replica.parameters["first"].grad
        assert grad is not None
        grad[1, 1] = torch.inf

    def memory(self) -> dict[str, Tensor]:
        """What the strategy keeps on this rank, copied."""
        return {key: value.clone() for key, value in self.controller.bound.state_dict().items()}

    def train(self, steps: Iterable[int]) -> None:
        """These steps of a training."""
        for step in steps:
            self.give(step)
            self.optimizer.step()


def fits(spec: str, size: int) -> bool:
    """Whether so many ranks can train by this strategy."""
    with contextlib.suppress(LaconicError):
        parse(spec).check(size, sgd(Numbers()))
        return True
    return False


def played(spec: str, size: int, act: Callable[[Rank], T], **how: Any) -> list[T]:
    """What `act` returns on every rank of a group, in rank order."""

    def play(comm: Loopback) -> T:
        rank = Rank(spec, comm, **how)
        result = act(rank)
        rank.optimizer.remove()
        return result

    return Loopback.run(size, play)


def is_clocked(spec: str) -> bool:
    """Whether no two runs of this strategy are alike, so that its laws are those of `tests/dist`."""
    strategy = parse(spec)
    assert isinstance(strategy, Strategy)
    return strategy.clocked
