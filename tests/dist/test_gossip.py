"""Gossip in real processes over gloo."""

from __future__ import annotations

import pytest
import torch

from tests.dist.distribute_world import pair, stop_and_go, trained
from tests.dist.nets import agree, flat, loss_of

SPECS = [
    "sgp()",
    "sgp(topology=linear(), wire='bf16')",
    "dpsgd(topology=ring())",
    "osgp(staleness=2, wire='fp16')",
]


def finished(spec):
    model, optimizer = trained(spec, steps=7)
    apart, own = agree(model), flat(model)
    with optimizer.averaged() as distance:
        inside = flat(model)
    given_back = torch.equal(flat(model), own)
    optimizer.finish()
    same, end = agree(model), flat(model)
    loss_of(model, 7).backward()
    optimizer.step()  # training may go on
    optimizer.remove()
    return apart, distance, given_back, same, torch.allclose(inside, end, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_differ_until_the_group_is_asked_for_its_model(pool, spec):
    for apart, distance, given_back, same, alike in pool.run(4, finished, spec):
        assert not apart
        assert 0 < distance < 0.1
        assert given_back
        assert same
        assert alike


@pytest.mark.parametrize("spec", SPECS)
def test_save_and_resume_gives_the_same_bits(pool, spec):
    """Saving settles what is under way, so both trainings are asked for their state at that step."""
    assert pool.run(4, resumed, spec) == [True] * 4


def resumed(spec):
    if not spec.startswith("osgp"):
        return stop_and_go(spec, 6, 4)
    whole, optimizer = trained(spec, 4)
    optimizer.state_dict()
    for step in range(4, 6):
        optimizer.zero_grad()
        loss_of(whole, step).backward()
        optimizer.step()
    model, optimizer = trained(spec, 4)
    saved, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    model, optimizer = pair(spec)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for step in range(4, 6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return torch.equal(flat(whole), flat(model))
