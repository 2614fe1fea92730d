"""SWAT under DistributedDataParallel in real processes over gloo, alone and with compressed gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, compressed, everywhere


@on_ranks(2, (None, "dgc(density=0.05)"))
def test_replicas_stay_bit_identical_and_learn(spec):
    plain = net()
    swat = laconic.sparsity.swat(plain, sparsity=0.8, refresh=3)
    model, optimizer, handle = compressed(spec, plain)
    losses = advance(model, optimizer, 40)
    assert agree(model) and sum(losses[-5:]) < sum(losses[:5])
    assert handle is None or handle.stats().payload_sent < 0.5 * 4 * 40 * flat(model).numel()
    first, second = everywhere(swat.state_dict())
    assert first.keys() == second.keys() and first
    for name in first:
        assert first[name]["weight"] == second[name]["weight"], "equal weights have equal thresholds"
    assert any(first[name]["input"] != second[name]["input"] for name in first), (
        "each rank has its own inputs"
    )


@on_ranks(2)
def test_gradients_are_ordinary_ones():
    plain, alone = net(), net()
    laconic.sparsity.swat(plain, sparsity=0.8)
    laconic.sparsity.swat(alone, sparsity=0.8)
    model = DistributedDataParallel(plain)  # it must live until backward is done
    loss_of(model, 0).backward()
    loss_of(alone, 0).backward()
    mean = torch.cat([part.grad.flatten() for part in alone.parameters()])
    dist.all_reduce(mean)
    found, expected = (
        torch.cat([part.grad.flatten() for part in plain.parameters()]),
        mean / dist.get_world_size(),
    )
    torch.testing.assert_close(found, expected)
