"""ADMM towards a table in real processes: one G on all ranks, dense and compressed, and after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.lowbit import admm


def parts(spec: str):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    model = DistributedDataParallel(plain)
    handle = admm(model, optimizer, gamma=0.02, every=4)
    exchange = laconic.compress(model, optimizer, spec) if spec else None
    return model, optimizer, handle, exchange


def advance(model, optimizer, steps):
    for step in steps:
        rng = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        x = torch.randn(16, 12, generator=rng)
        loss = nn.functional.cross_entropy(model(x), x.argmax(1) % 6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(spec):
    model, optimizer, handle, _ = parts(spec)
    start = handle.residual()
    advance(model, optimizer, range(80))
    state = handle.state_dict()["tensors"]
    return start, handle.residual(), {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("spec", ["", "topk(density=0.1)"])
def test_all_ranks_have_one_g_and_one_lambda(pool, spec) -> None:
    (start, end, first), *others = pool.run(3, trained, spec)
    assert end != start and first["lambda/0.weight"].any()
    for _, residual, state in others:
        assert residual == end and state.keys() == first.keys()
        assert all(torch.equal(state[key], value) for key, value in first.items())


def stop_and_go(spec):
    model, optimizer, handle, exchange = parts(spec)
    advance(model, optimizer, range(6))
    each = (model, optimizer, handle, exchange)
    state = copy.deepcopy([part.state_dict() for part in each])
    advance(model, optimizer, range(6, 13))
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    handle.remove()
    exchange.remove()
    model, optimizer, handle, exchange = parts(spec)
    for part, its in zip((model, optimizer, handle, exchange), state, strict=True):
        part.load_state_dict(its)
    advance(model, optimizer, range(6, 13))
    return whole, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_resumed_run_has_the_same_bits(pool) -> None:
    for whole, resumed in pool.run(2, stop_and_go, "topk(density=0.1)"):
        assert torch.equal(whole, resumed)
