"""SWAT under DistributedDataParallel in real processes over gloo, alone and with compressed gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import SGD, agree, compress_anyway, flat, loss_of, net


def steps(spec, count):
    """Whether replicas agree after some steps; weights' and inputs' thresholds; payload sent."""
    plain = net()
    swat = laconic.sparsity.swat(plain, sparsity=0.8, refresh=3)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = None if spec is None else compress_anyway(model, optimizer, spec)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = swat.state_dict()
    dense = 4 * count * flat(model).numel()
    sent = 1.0 if handle is None else handle.stats().payload_sent / dense
    return (
        agree(model),
        losses,
        {name: (each["weight"], each["input"]) for name, each in state.items()},
        sent,
    )


@pytest.mark.parametrize("spec", [None, "dgc(density=0.05)"])
def test_replicas_stay_bit_identical_and_learn(pool, spec):
    found = pool.run(2, steps, spec, 40)
    for same, losses, _, sent in found:
        assert same
        assert sum(losses[-5:]) < sum(losses[:5])
        assert sent == 1.0 if spec is None else sent < 0.5
    (_, _, first, _), (_, _, second, _) = found
    assert first.keys() == second.keys() and first
    for name in first:
        assert first[name][0] == second[name][0], "equal weights have equal thresholds"
    assert any(first[name][1] != second[name][1] for name in first), "each rank has its own inputs"


def gradients():
    """This rank's mean gradient by DDP, and the mean of all ranks' own ones."""
    plain, alone = net(), net()
    laconic.sparsity.swat(plain, sparsity=0.8)
    laconic.sparsity.swat(alone, sparsity=0.8)
    model = DistributedDataParallel(plain)  # it must live until backward is done
    loss_of(model, 0).backward()
    loss_of(alone, 0).backward()
    mean = torch.cat([part.grad.flatten() for part in alone.parameters()])
    dist.all_reduce(mean)
    return torch.cat([part.grad.flatten() for part in plain.parameters()]), mean / dist.get_world_size()


def test_gradients_are_ordinary_ones(pool):
    for found, expected in pool.run(2, gradients):
        torch.testing.assert_close(found, expected)
