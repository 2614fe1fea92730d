"""Counts of floating-point operations: by hand, by torch, and of sparse models."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.shared import for_each
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from laconic.sparsity import rigl, sparsify
from laconic.sparsity.flops import forward_flops

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters())


FORWARD = [  # model, its inputs, and operations of a forward pass by hand
    (nn.Linear(3, 5), [torch.randn(2, 7, 3)], 2 * 15 * 14),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), [torch.randn(2, 4, 8, 8)], 2 * 6 * 2 * 9 * 2 * 16),
    (nn.Embedding(9, 4), [torch.zeros(3, 5, dtype=torch.long)], 0),
    (nn.LSTM(3, 5), [torch.randn(7, 2, 3)], 2 * 20 * (3 + 5) * 14),
    (nn.GRU(3, 5, 2, bidirectional=True), [torch.randn(7, 2, 3)], 2 * 15 * 2 * (3 + 5 + 10 + 5) * 14),
    (nn.LSTM(3, 5, proj_size=2), [torch.randn(7, 3)], 2 * (20 * (3 + 2) + 10) * 7),
    (nn.RNN(3, 5), [pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])], 2 * 5 * (3 + 5) * 6),
    (nn.GRUCell(3, 5), [torch.randn(4, 3)], 2 * 15 * (3 + 5) * 4),
    (nn.MultiheadAttention(4, 2), [torch.randn(3, 2, 4)] * 3, 2 * 4 * 16 * 6),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        [torch.randn(3, 2, 4), torch.randn(7, 2, 3), torch.randn(7, 2, 5)],
        2 * ((16 + 16) * 6 + (12 + 20) * 14),
    ),
    (nn.TransformerEncoderLayer(4, 2, 6), [torch.randn(3, 2, 4)], 2 * (4 * 16 + 2 * 24) * 6),
]


@for_each("model, inputs, wanted", FORWARD)
def test_operations_of_a_forward_pass_are_those_by_hand(model, inputs, wanted) -> None:
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert forward_flops(model, *inputs) == (wanted, wanted)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training and torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_operations_of_convolutions_are_those_of_torch() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 10)
    )
    x = torch.randn(2, 3, 10, 10)
    with FlopCounterMode(display=False) as counter:
        net(x)
    assert forward_flops(net, x) == (counter.get_total_flops(),) * 2


def test_operations_of_a_sparse_model_are_those_of_its_entries_in_use() -> None:
    layer = nn.LSTM(3, 5)
    sparse = rigl(layer, adam(layer), 0.4, steps=1000)
    used = sum(int(mask.sum()) for mask in sparse.masks.values())
    found = sparse.flops(torch.randn(7, 2, 3))
    assert (found.forward, found.dense_forward) == (2 * used * 14, 2 * 160 * 14)
    updates = 8  # at 0, 100, ... 700, until 0.75 of the training
    extra = updates / 1000 * (found.dense_forward - found.forward)
    assert found.training == pytest.approx(3 * found.forward + extra)
    assert found.dense_training == 3 * found.dense_forward
    layer = nn.MultiheadAttention(4, 2)
    sparse = sparsify(layer, adam(layer), "static_masks(density=0.25)", steps=10)
    q, k, v = (int(part.sum()) for part in sparse.masks["in_proj_weight"].chunk(3))
    out = int(layer.out_proj.weight.count_nonzero())
    found = sparse.flops(torch.randn(3, 2, 4), *[torch.randn(7, 2, 4)] * 2)
    assert found.forward == 2 * ((q + out) * 6 + (k + v) * 14)
    assert found.training == 3 * found.forward
