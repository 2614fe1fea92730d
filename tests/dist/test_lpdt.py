"""Models that compute in 8 bits and gossip in 8 bits, in real processes over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.dist.nets import agree, flat
from tests.dist.pool import on_ranks
from tests.dist.runs import resumed


def pair(spec):
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 8, 3), laconic.lowbit.EvoNormS0(8), nn.Flatten(), nn.Linear(288, 32), nn.Linear(32, 3)
    )
    model = laconic.lowbit.convert(plain, seed=dist.get_rank())
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), spec)


def go(model, optimizer, steps):
    """Each rank has seen mostly one of three kinds of images; the loss of the last step."""
    loss = torch.tensor(0.0)
    for step in steps:
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        y = torch.randint(0, 3, (8,), generator=rng)
        y[:6] = dist.get_rank() % 3
        x = torch.randn(8, 1, 8, 8, generator=rng)
        x[torch.arange(8), 0, 2 * y + 1] += 2.0
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def right(model):
    """The share of right answers on images of all kinds, by the group's model."""
    rng = torch.Generator().manual_seed(7)
    y = torch.arange(60) % 3
    x = torch.randn(60, 1, 8, 8, generator=rng)
    x[torch.arange(60), 0, 2 * y + 1] += 2.0
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


@on_ranks(4)
def test_low_bit_models_gossip_in_8_bits_learn_and_resume():
    spec = "lpdt()"
    total = 30
    stop = 20
    (whole, ahead), (model, optimizer) = resumed(lambda: pair(spec), go, total, stop)
    same, sent = torch.equal(flat(whole), flat(model)), ahead.stats().ratio
    optimizer.finish()
    assert same and agree(model) and right(model) > 0.9
    assert sent > 1.8  # two neighbours, a byte an entry


def in_step(spec, steps):
    """Under DistributedDataParallel the same layers keep replicas equal, though their random bits differ."""
    model, optimizer = pair(spec)
    go(model, optimizer, range(steps))
    return agree(model)


def test_low_bit_models_train_by_gradients_too(pool):
    assert all(pool.run(4, in_step, "dense()", 4))
