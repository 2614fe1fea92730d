"""Gossip in real processes over gloo."""

from __future__ import annotations

import torch

from tests.dist.nets import agree, flat, loss_of
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, distributed, strategy_resumes, trained

SPECS = [
    "sgp()",
    "sgp(topology=linear(), wire='bf16')",
    "dpsgd(topology=ring())",
    "osgp(staleness=2, wire='fp16')",
]


@on_ranks(4, SPECS)
def test_ranks_differ_until_the_group_is_asked_for_its_model(spec):
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
    assert not apart
    assert 0 < distance < 0.1
    assert given_back and same
    assert torch.allclose(inside, end, rtol=1e-6, atol=1e-7)


@on_ranks(4, SPECS)
def test_save_and_resume_gives_the_same_bits(spec):
    """Saving settles what is under way, so both trainings are asked for their state at that step."""
    assert resumed(spec)


def resumed(spec):
    if not spec.startswith("osgp"):
        return strategy_resumes(spec, 6, 4)
    whole, optimizer = trained(spec, 4)
    optimizer.state_dict()
    advance(whole, optimizer, range(4, 6))
    model, optimizer = trained(spec, 4)
    saved, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    model, optimizer = distributed(spec)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    advance(model, optimizer, range(4, 6))
    return torch.equal(flat(whole), flat(model))
