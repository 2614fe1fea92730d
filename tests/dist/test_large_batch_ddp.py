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
from tests.dist.pool import on_ranks
from tests.dist.runs import compressed, everywhere

STEPS, BATCH = 5, 28


@on_ranks(2)
def test_micro_batches_on_ranks_are_one_large_batch() -> None:
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
    many, alone, exchanges, equal = flat(model), flat(alone), handle.stats().steps, agree(model)
    assert equal and exchanges == STEPS
    torch.testing.assert_close(many, alone, rtol=1e-3, atol=1e-4)  # LAMB's first steps are signs


@on_ranks(2)
def test_copies_on_ranks_have_one_factor_and_one_exchange() -> None:
    """Of their own examples."""
    model, optimizer, handle = compressed("dense()", sgd={"lr": 0.05})
    copies = Copies(3, correct_every=2)
    for step in range(STEPS):
        x, y = batch(dist.get_rank(), step, 6)
        rng = torch.Generator().manual_seed(step)
        noisy = x.repeat(3, 1) + 0.5 * torch.randn(18, 20, generator=rng)
        optimizer.zero_grad()
        copies.backward(model, F.cross_entropy, noisy, y.repeat(3))
        optimizer.step()
    factor, other = everywhere(copies.factor)
    assert agree(model) and factor == other > 1 and handle.stats().steps == STEPS
