"""Binarised and quantised models under DistributedDataParallel in real processes over gloo, alone and
compressed.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import SGD, agree, compress_anyway, loss_of, net

WAYS = {
    "binarise": lambda model, seed: laconic.lowbit.binarise(model, first="binary", keep=()),
    "quantise": lambda model, seed: laconic.lowbit.quantise(model, 1, 2, 6, first="binary", seed=seed),
}


def steps(way, spec, count):
    """Whether replicas agree, the losses, the largest master weight, and whether the packed model agrees."""
    plain = net()
    handle = WAYS[way](plain, torch.distributed.get_rank())
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), **(SGD | {"lr": 0.5}))
    if spec is not None:
        compress_anyway(model, optimizer, spec)
    losses, largest = [], 0.0
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        largest = max([largest, *(plain.get_parameter(name).abs().max().item() for name in handle.weights)])
    flips = handle.flips()
    packed = laconic.lowbit.pack(plain)
    plain.eval()
    same = all(
        torch.equal(packed.get_submodule(name)(x), layer(x))
        for name, layer in handle.layers.items()
        for x in [torch.randn(5, layer.in_features)]
    )
    return agree(model), losses, largest, flips, same


@pytest.mark.parametrize("spec", [None, "dgc(density=0.05)", "sign()"])
@pytest.mark.parametrize("way", WAYS)
def test_replicas_stay_bit_identical_and_clipped(pool, way, spec):
    for same, losses, largest, flips, packed in pool.run(2, steps, way, spec, 20):
        assert same and packed
        assert all(loss == loss for loss in losses)
        assert largest <= 1 and flips > 0
