"""ADMM towards a table in real processes: one G on all ranks, dense and compressed, and after a resume."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.lowbit import admm
from tests.dist.nets import flat
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, everywhere, same, stop_and_go


def parts(spec: str):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    model = DistributedDataParallel(plain)
    handle = admm(model, optimizer, gamma=0.02, every=4)
    exchange = laconic.compress(model, optimizer, spec) if spec else None
    return model, optimizer, handle, exchange


def loss_of(model, step):
    rng = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    x = torch.randn(16, 12, generator=rng)
    return nn.functional.cross_entropy(model(x), x.argmax(1) % 6)


@on_ranks(3, ("", "topk(density=0.1)"))
def test_all_ranks_have_one_g_and_one_lambda(spec) -> None:
    model, optimizer, handle, _ = parts(spec)
    start = handle.residual()
    advance(model, optimizer, 24, loss_of)
    state = handle.state_dict()["tensors"]
    assert handle.residual() != start and state["lambda/0.weight"].any()
    first, *others = everywhere((handle.residual(), state))
    assert all(same(first, other) for other in others)


@on_ranks(2)
def test_a_resumed_run_has_the_same_bits() -> None:
    def train(model, optimizer, steps):
        advance(model, optimizer, steps, loss_of)

    (whole, *_), (model, *_) = stop_and_go(lambda again: parts("topk(density=0.1)"), 13, 6, train)
    assert torch.equal(flat(whole), flat(model))
