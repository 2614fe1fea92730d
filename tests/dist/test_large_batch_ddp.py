"""Accumulation on several ranks: one exchange a step, and the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.recipes import Accumulation, Copies, large_batch
from tests.dist.nets import agree, batch, flat, net

STEPS, BATCH = 5, 28


def parted() -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Two ranks with micro-batches, and one process with all examples at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    settings: dict[str, Any] = {"batch": BATCH, "base_batch": 7, "steps": STEPS, "lr": 0.01}
    model, alone = DistributedDataParallel(net()), net()
    optimizer, schedule = large_batch(model, **settings)
    handle = laconic.compress(model, optimizer, "dense()")
    own, its_schedule = large_batch(alone, **settings)
    accumulation = Accumulation(BATCH, most=5)
    assert accumulation.sizes == (5, 5, 4)
    for step in range(STEPS):
        x, y = batch(0, step, BATCH)
        optimizer.zero_grad()
        for share, rows, labels in accumulation.parts(model, x[rank::size], y[rank::size]):
            (share * F.cross_entropy(model(rows), labels)).backward()
        optimizer.step()
        schedule.step()
        own.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        own.step()
        its_schedule.step()
    return flat(model), flat(alone), handle.stats().steps, agree(model)


def test_micro_batches_on_ranks_are_one_large_batch(pool: Any) -> None:
    for many, alone, exchanges, equal in pool.run(2, parted):
        assert equal
        assert exchanges == STEPS
        torch.testing.assert_close(many, alone, rtol=1e-3, atol=1e-4)  # LAMB's first steps are signs


def copied() -> tuple[bool, float, torch.Tensor, int]:
    """Two ranks with copies of their own examples: the factor is equal, and copies are exchanged once."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = laconic.compress(model, optimizer, "dense()")
    copies = Copies(3, correct_every=2)
    for step in range(STEPS):
        x, y = batch(dist.get_rank(), step, 6)
        rng = torch.Generator().manual_seed(step)
        noisy = x.repeat(3, 1) + 0.5 * torch.randn(18, 20, generator=rng)
        optimizer.zero_grad()
        copies.backward(model, F.cross_entropy, noisy, y.repeat(3))
        optimizer.step()
    return agree(model), copies.factor, flat(model), handle.stats().steps


def test_copies_on_ranks_have_one_factor_and_one_exchange(pool: Any) -> None:
    (equal, factor, _, exchanges), (_, other, _, _) = pool.run(2, copied)
    assert equal
    assert factor == other > 1
    assert exchanges == STEPS
