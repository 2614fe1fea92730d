"""auto() in real processes over gloo: all ranks decide alike, say so, and train as they would without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.tasks.decisions import Decisions
from tests.dist.ddp_world import MANY
from tests.dist.nets import SGD, agree, flat, loss_of, net
from tests.dist.test_low_bits_ddp import overflow

FEW = "auto((sum(), gather(sparse(topk(density=0.1)))))"


def decided(spec, steps):
    """Train; whether replicas agree, what each tensor's rung is in the saved state, and what was said."""
    heard = Decisions()
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, spec)
    same = True
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        same = same and agree(model)
    prefix = f"rank{dist.get_rank()}/route0/once/rung/"
    tensors = handle.state_dict()["tensors"]
    rungs = {key.removeprefix(prefix): int(value) for key, value in tensors.items() if key.startswith(prefix)}
    handle.remove()
    said = heard.take()
    heard.close()
    return same, rungs, said, flat(model)


@pytest.mark.parametrize("spec", ["auto()", FEW])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_decide_alike_and_rank_0_says_so(pool, spec, size):
    results = pool.run(size, decided, spec, 30)
    first = results[0][1]
    assert all(same and rungs == first for same, rungs, _, _ in results)
    assert len(first) == len(list(net().parameters())) and min(first.values()) >= 0
    assert "from step" in results[0][2][0]
    assert not any(said for _, _, said, _ in results[1:])


def test_one_rank_alone_may_take_it_too(pool):
    same, rungs, _, _ = pool.run(1, decided, "auto()", 30)[0]
    assert same and min(rungs.values()) >= 0


@pytest.mark.parametrize("when", [1, 4, 16])
def test_inf_in_the_last_bucket_skips_the_step(pool, when):
    """In the first rung's trial, in a later one's, and when all is decided."""
    for each in pool.run(2, overflow, FEW, when, 20):
        assert each.moved == [step != when for step in range(20)]
        assert each.scale == 512.0 and each.agreed
        rungs = [int(value) for key, value in each.state.items() if "/once/rung/" in key]
        assert min(rungs) >= 0, "it has decided after all"


def half_way(spec, first, rest):
    """Train until it has decided, save, and go on in new objects; rungs before and after, and agreement."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, spec)
    for step in range(first):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    saved = handle.state_dict()
    plain = net(seed=99)
    plain.load_state_dict(model.module.state_dict())
    again = DistributedDataParallel(plain, **MANY)
    updates = torch.optim.SGD(again.parameters(), **SGD)
    updates.load_state_dict(optimizer.state_dict())
    other = laconic.compress(again, updates, spec)
    other.load_state_dict(saved)
    for step in range(first, first + rest):
        updates.zero_grad()
        loss_of(again, step).backward()
        updates.step()
    before, after = (
        {key: int(value) for key, value in state["tensors"].items() if "/once/rung/" in key}
        for state in (saved, other.state_dict())
    )
    return before, after, agree(again)


def test_a_resumed_training_goes_on_without_a_new_trial(pool):
    for before, after, same in pool.run(2, half_way, FEW, 14, 5):
        assert before == after and min(before.values()) >= 0
        assert same
