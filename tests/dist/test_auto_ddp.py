"""auto() in real processes over gloo: all ranks decide alike, say so, and train as they would without it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.reducers.autotune import CHOSEN
from laconic.tools.tasks.decisions import Decisions
from tests.dist.nets import SGD, agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance, compressed, overflow

FEW = "auto((sum(), gather(sparse(topk(density=0.1)))))"
PINNED = "auto((sum(), topk(density=0.1)), pinned=topk(density=0.1))"
MOST = 1000  # steps of a search on a busy machine


def candidate_in(tensors):
    """The candidate that a saved state says was chosen; -1 where none was yet."""
    return next(int(value) for key, value in tensors.items() if key.endswith(f"/{CHOSEN}"))


def decided(spec):
    """Train until it has decided, and a few steps more; whether replicas agree, the candidate in the saved
    state, and what was said."""
    heard = Decisions()
    model, optimizer, handle = compressed(spec, **MANY)
    same, chosen, left = True, -1, 5
    for step in range(MOST):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        same = same and agree(model)
        chosen = candidate_in(handle.state_dict()["tensors"])
        left -= chosen >= 0
        if not left:
            break
    handle.remove()
    said = heard.pop_all()
    heard.close()
    return same, chosen, said, flat(model)


@pytest.mark.parametrize("spec", ["auto()", FEW])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_decide_alike_and_rank_0_says_so(pool, spec, size):
    results = pool.run(size, decided, spec)
    first = results[0][1]
    assert all(same and chosen == first for same, chosen, _, _ in results)
    assert first >= 0
    assert "from step" in results[0][2][0]
    assert not any(said for _, _, said, _ in results[1:])


def test_one_rank_alone_may_take_it_too(pool):
    same, chosen, _, _ = pool.run(1, decided, "auto()")[0]
    assert same and chosen >= 0


@pytest.mark.parametrize(("spec", "when"), [(FEW, 1), (FEW, 7), (PINNED, 7)])
def test_inf_in_the_last_bucket_skips_the_step(pool, spec, when):
    """While the first candidate is timed, while a later one is, and when all is decided."""
    for each in pool.run(2, overflow, spec, when, 20):
        assert each.moved == [step != when for step in range(20)]
        assert each.scale == 512.0 and each.agreed
        assert candidate_in(each.state) == 1 or spec == FEW


@on_ranks(2)
def test_a_resumed_training_goes_on_without_a_new_search():
    """Train until it has decided, save, go on in new objects; candidate before and after, and agreement."""
    spec = FEW
    rest = 5
    model, optimizer, handle = compressed(spec, **MANY)
    first = 0
    while first < MOST and candidate_in(handle.state_dict()["tensors"]) < 0:
        optimizer.zero_grad()
        loss_of(model, first).backward()
        optimizer.step()
        first += 1
    saved = handle.state_dict()
    plain = net(seed=99)
    plain.load_state_dict(model.module.state_dict())
    again = DistributedDataParallel(plain, **MANY)
    updates = torch.optim.SGD(again.parameters(), **SGD)
    updates.load_state_dict(optimizer.state_dict())
    other = laconic.compress(again, updates, spec)
    other.load_state_dict(saved)
    advance(again, updates, range(first, first + rest))
    before, after = (candidate_in(state["tensors"]) for state in (saved, other.state_dict()))
    assert before == after >= 0
    assert agree(again)
