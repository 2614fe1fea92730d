"""Binarised and quantised models under DistributedDataParallel in real processes over gloo, alone and
compressed.
"""

from __future__ import annotations

from itertools import product

import torch

import laconic
from tests.dist.nets import SGD, agree, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, compressed

WAYS = {
    "binarise": lambda model, seed: laconic.lowbit.binarise(model, first="binary", keep=()),
    "quantise": lambda model, seed: laconic.lowbit.quantise(model, 1, 2, 6, first="binary", seed=seed),
}


@on_ranks(2, product([None, "dgc(density=0.05)", "sign()"], WAYS))
def test_replicas_stay_bit_identical_and_clipped(spec, way):
    plain = net()
    handle = WAYS[way](plain, torch.distributed.get_rank())
    model, optimizer, _ = compressed(spec, plain, sgd=SGD | {"lr": 0.5})
    for step in range(20):
        (loss,) = advance(model, optimizer, [step])
        assert loss == loss and all(plain.get_parameter(name).abs().max() <= 1 for name in handle.weights)
    assert agree(model) and handle.flips() > 0
    packed = laconic.lowbit.pack(plain)
    plain.eval()
    for name, layer in handle.layers.items():
        x = torch.randn(5, layer.in_features)
        assert torch.equal(packed.get_submodule(name)(x), layer(x))
