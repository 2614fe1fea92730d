"""SlowMo, DiLoCo, LSGD and EASGD in real processes over gloo."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.errors import AttachError, LaconicError, NonFiniteError
from tests.dist.nets import SGD, agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, everywhere, resumed

SPECS = [
    "slowmo(every=3)",
    "slowmo(every=3, base=osgp(), beta=0.3)",
    "diloco(every=3, compressor=minmax(bits=8))",
    "lsgd(every=4, local_every=2, ranks_per_node=2)",
    "easgd(every=2)",
]


def pair(spec):
    model = net()
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), **SGD), spec)


@on_ranks(4, SPECS)
def test_a_resumed_run_has_the_same_bits_and_ends_alike(spec):
    (whole, _), (model, optimizer) = resumed(lambda: pair(spec), advance, 8, 6)
    same, apart = torch.equal(flat(whole), flat(model)), agree(model)
    optimizer.finish()
    assert same and not apart and agree(model)
    assert optimizer.notes()["rounds"] >= 2


@on_ranks(3)
def test_a_slow_rank_does_fewer_steps_and_ranks_end_as_they_like():
    """Rank 0 is slow. States may be saved on the way, by each rank after a number of steps of its own."""
    model, optimizer = pair("lsgd(every=4, local_every=4, ranks_per_node=1, count='total')")
    rank, steps = dist.get_rank(), 0
    for until in (2, 4):  # meetings
        while optimizer.notes().get("rounds", 0) < until:
            advance(model, optimizer, [steps])
            steps += 1
            time.sleep(0.1 if rank == 0 else 0.001)
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.notes()["rounds"] == 4
    advance(model, optimizer, range(steps, steps + rank))
    optimizer.finish()
    assert agree(model) and optimizer.stats().steps == steps + rank
    first, *others = everywhere(steps)
    assert first + sum(others) == 4 * 3 * 4 and first < min(others)
    optimizer.remove()


@on_ranks(
    2, ["diloco(every=4, overlap=3)", "diloco(every=4, fragments=2, overlap=3, mix=0.5)"], timeout_s=240
)
def test_the_average_has_what_is_on_its_way(spec):
    steps = 5
    model, optimizer = pair(spec)
    advance(model, optimizer, range(steps))
    before = flat(model)
    with optimizer.averaged():
        shown = flat(model)
    same = torch.equal(flat(model), before)
    with optimizer.averaged():
        again = flat(model)
    optimizer.finish()
    assert torch.equal(shown, flat(model)) and torch.equal(shown, again) and same
    assert not torch.equal(shown, before)


def sends_infinity(model, optimizer, step):
    """A step after which a weight of rank 1 is Inf as it is sent, and as before afterwards."""
    first = next(model.parameters()).data
    loss_of(model, step).backward()
    kept = first.clone()
    if dist.get_rank() == 1:
        first.fill_(torch.inf)
    optimizer.step()
    first.copy_(kept)


@on_ranks(
    2, ["diloco(every=4)", "diloco(every=4, overlap=2)", "diloco(every=4, fragments=2, overlap=3, mix=0.5)"]
)
def test_after_a_step_that_is_void_a_saved_state_goes_on(spec):
    ends = []
    for fault in (False, True):
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)  # without decay, which would take Inf up
        model, optimizer = laconic.distribute(model, plain, spec)
        advance(model, optimizer, range(3))
        saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        if fault:
            with pytest.raises(NonFiniteError, match="an outer gradient is not finite"):
                sends_infinity(model, optimizer, 3)
                advance(model, optimizer, range(4, 20))
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[0])
        advance(model, optimizer, range(3, 20))
        optimizer.finish()
        ends.append(flat(model))
    assert torch.equal(*ends)


@on_ranks(2)
def test_remove_leaves_in_16_bits_too_what_was_on_its_way():
    parts = nn.ParameterDict({"brief": torch.ones(5, dtype=torch.bfloat16), "long": torch.ones(5)})
    plain = torch.optim.SGD(parts.parameters(), lr=1.0)
    model, optimizer = laconic.distribute(parts, plain, "diloco(every=3, overlap=2, lr=1.0, momentum=0.0)")
    for _ in range(3):
        for each in model.parameters():
            each.grad = torch.full_like(each, dist.get_rank() + 1.0)
        optimizer.step()
    optimizer.remove()
    assert [each.detach().float().tolist() for each in model.parameters()] == [[-3.5] * 5] * 2


def some_tell_their_losses(*ranks):
    model, optimizer = pair("lsgd(every=2, local_every=2, ranks_per_node=2)")
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step((lambda: 1.0) if dist.get_rank() in ranks else None)


@on_ranks(4)
def test_a_loss_that_one_rank_does_not_tell_is_missed_on_all():
    with pytest.raises(AttachError, match="rank 2 has recorded no loss"):
        some_tell_their_losses(0, 1, 3)


@on_ranks(2)
def test_losses_that_all_tell_are_enough():
    some_tell_their_losses(0, 1)


@on_ranks(2)
def test_machines_that_nobody_told_of_are_asked_for():
    with pytest.raises(LaconicError, match="set ranks_per_node= to the number of ranks per machine"):
        pair("lsgd()")
