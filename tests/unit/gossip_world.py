"""Gossiping ranks as threads, each with a model of one vector and an optimiser of plain steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.spec import parse
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy

N = 7


class Vector(nn.Module):
    """One parameter of this shape, which differs by rank at the start."""

    def __init__(self, rank: int, shape: tuple[int, ...] = (N,)) -> None:
        super().__init__()
        start = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        self.x = nn.Parameter(start)


def start(size: int, shape: tuple[int, ...] = (N,)) -> Tensor:
    """All ranks' first parameters, float32 (size, n)."""
    return torch.stack([Vector(rank, shape).x.detach().flatten() for rank in range(size)])


def gradient(rank: int, step: int, shape: tuple[int, ...] = (N,)) -> Tensor:
    """A gradient that does not depend on the parameters, float32 of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + 100 * step + rank))


def bound(
    spec: str, comm: Loopback, lr: float = 0.1, shape: tuple[int, ...] = (N,)
) -> tuple[BoundStrategy, Callable[[int], None], Loopback]:
    """The strategy at work on this rank, a function that takes step `step` with `gradient`, a group aside."""
    model = Vector(comm.rank, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    strategy: Any = parse(spec)
    strategy.check(comm.size, optimizer)
    aside, replica = comm.split(0), Replica(model, optimizer)
    replica.flatten()
    at_work: BoundStrategy = strategy.bind(replica, optimizer, Metered(comm))

    def take(step: int) -> None:
        model.x.grad = gradient(comm.rank, step, shape)
        at_work.step(optimizer.step)

    return at_work, take, aside


def trajectory(spec: str, size: int, steps: int, lr: float = 0.1, shape: tuple[int, ...] = (N,)) -> Tensor:
    """Every rank's parameters after each step, float32 (steps, size, n)."""

    def play(comm: Loopback) -> Tensor:
        at_work, take, _ = bound(spec, comm, lr, shape)
        seen = []
        for step in range(steps):
            take(step)
            seen.append(at_work.replica.flat.clone())
        at_work.close()
        return torch.stack(seen)

    return torch.stack(Loopback.run(size, play), dim=1)
