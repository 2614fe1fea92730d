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
    """One parameter, (N,), which differs by rank at the start."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        start = torch.randn(N, generator=torch.Generator().manual_seed(rank))
        self.x = nn.Parameter(start)


def start(size: int) -> Tensor:
    """All ranks' first parameters, float32 (size, N)."""
    return torch.stack([Vector(rank).x.detach() for rank in range(size)])


def gradient(rank: int, step: int) -> Tensor:
    """A gradient that does not depend on the parameters, float32 (N,)."""
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 + 100 * step + rank))


def bound(
    spec: str, comm: Loopback, lr: float = 0.1
) -> tuple[BoundStrategy, Callable[[int], None], Loopback]:
    """The strategy at work on this rank, a function that takes step `step` with `gradient`, a group aside."""
    model = Vector(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    strategy: Any = parse(spec)
    strategy.check(comm.size, optimizer)
    aside, replica = comm.split(0), Replica(model, optimizer)
    replica.flatten()
    at_work: BoundStrategy = strategy.bind(replica, optimizer, Metered(comm))

    def take(step: int) -> None:
        model.x.grad = gradient(comm.rank, step)
        at_work.step(optimizer.step)

    return at_work, take, aside


def trajectory(spec: str, size: int, steps: int, lr: float = 0.1) -> Tensor:
    """Every rank's parameters after each step, float32 (steps, size, N)."""

    def play(comm: Loopback) -> Tensor:
        at_work, take, _ = bound(spec, comm, lr)
        seen = []
        for step in range(steps):
            take(step)
            seen.append(at_work.replica.flat.clone())
        at_work.close()
        return torch.stack(seen)

    return torch.stack(Loopback.run(size, play), dim=1)
