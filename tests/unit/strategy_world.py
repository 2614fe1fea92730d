"""Ranks as threads that train a few numbers by a strategy: gradients are plain functions of rank and step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Strategy

SHAPES = {"first": (4, 3), "second": (5,)}
N = 17
Rates = tuple[float, float]  # of the two tensors
RATES: Rates = (0.1, 0.03)
Loss = Callable[[int, int], float | None]  # of rank and step


class Numbers(nn.Module):
    """Two parameters, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            start = torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
            self.register_parameter(name, nn.Parameter(start))


def start() -> Tensor:
    """Where every rank begins, (N,)."""
    return torch.cat([each.detach().flatten() for each in Numbers().parameters()])


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """Pulls x (N,) to a point that differs by rank and step."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    point = torch.randn(N, generator=rng, dtype=torch.float32, device="cpu")
    return x - point - rank


def spread(rates: Rates) -> Tensor:
    """The rate of every number, (N,)."""
    pairs = zip(rates, SHAPES.values(), strict=True)
    return torch.cat([torch.full((math.prod(shape),), rate) for rate, shape in pairs])


def halved(step: int) -> Rates:
    """RATES at first, half of them after four steps, a third after eight."""
    return (RATES[0] / (1 + step // 4), RATES[1] / (1 + step // 4))


def sgd(model: nn.Module, rates: Rates = (0.1, 0.1), **options: Any) -> Optimizer:
    """torch's SGD with a group for each tensor."""
    parts = [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), rates, strict=True)]
    return torch.optim.SGD(parts, **options)


@dataclass
class Worker:
    """One rank's replica, strategy and optimiser."""

    replica: Replica
    optimizer: Optimizer
    bound: BoundStrategy
    comm: Metered
    aside: Loopback

    def train(self, steps, *, alike=False, loss=lambda rank, step: 1.0, schedule=None) -> None:
        """So many steps; `alike`: every rank takes the first one's gradients."""
        for step in steps:
            if schedule is not None:
                for group, rate in zip(self.optimizer.param_groups, schedule(step), strict=True):
                    group["lr"] = rate
            slope = gradient(self.replica.flat, 0 if alike else self.comm.rank, step)
            for name, grad in self.replica.views(slope).items():
                self.replica.parameters[name].grad = grad
            self.bound.step(self.optimizer.step, loss(self.comm.rank, step))


def worker(spec: str, comm: Loopback, optimise: Callable[[nn.Module], Optimizer] = sgd) -> Worker:
    """A rank that is about to begin."""
    model = Numbers()
    optimizer, strategy = optimise(model), laconic.parse(spec)
    assert isinstance(strategy, Strategy)
    replica = Replica(model, optimizer)
    strategy.check(comm.size, optimizer)
    replica.flatten()
    metered = Metered(comm.split(0))  # another may be at work in the same world
    bound = strategy.bind(replica, optimizer, metered)
    metered.reset()
    return Worker(replica, optimizer, bound, metered, comm.split(0))


def trained(spec, size, steps, optimise=sgd, **how) -> list[Tensor]:
    """Every rank's parameters (N,) in the end."""

    def play(comm: Loopback) -> Tensor:
        rank = worker(spec, comm, optimise)
        with contextlib.closing(rank.bound):
            rank.train(range(steps), **how)
            return rank.replica.flat.clone()

    return Loopback.run(size, play)


def stopped_and_resumed(spec, size, stop, steps, **how) -> list[tuple[Tensor, Tensor]]:
    """Every rank's parameters when it never stopped, and when a new one took over after `stop` steps."""

    def momentum(model: nn.Module) -> Optimizer:
        return sgd(model, momentum=0.9)

    def play(comm: Loopback) -> tuple[Tensor, Tensor]:
        ends = []
        for stops in (None, stop):
            rank = worker(spec, comm, momentum)
            with contextlib.closing(rank.bound):
                rank.train(range(stops or steps), **how)
                if stops is not None:
                    rank = taken_over(rank, worker(spec, comm, momentum), stops)
                    rank.train(range(stops, steps), **how)
                ends.append(rank.replica.flat.clone())
        return ends[0], ends[1]

    return Loopback.run(size, play)


def taken_over(old: Worker, new: Worker, steps: int) -> Worker:
    """`new` with all that `old` saves."""
    old.bound.drain(old.aside)
    old.bound.close()
    state: Mapping[str, Tensor] = {key: value.clone() for key, value in old.bound.state_dict().items()}
    new.bound.check_state(state)
    new.bound.load_state_dict(state, steps)
    new.replica.flat.copy_(old.replica.flat)
    new.optimizer.load_state_dict(old.optimizer.state_dict())
    return new


def same_bits(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensors[0], each) for each in tensors) and bool(tensors[0].isfinite().all())
