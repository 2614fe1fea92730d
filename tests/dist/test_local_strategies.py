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
from tests.dist.distribute_world import resumed
from tests.dist.nets import SGD, agree, flat, loss_of, net

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


def go(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.note_loss(loss)
        optimizer.step()


def whole_and_resumed(spec, total, stop):
    """Whether a run that was stopped has the same bits, whether ranks agree in the end, and what was told."""
    (whole, _), (model, optimizer) = resumed(lambda: pair(spec), go, total, stop)
    same, apart = torch.equal(flat(whole), flat(model)), agree(model)
    optimizer.finish()
    return same, apart, agree(model), optimizer.notes()


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_has_the_same_bits_and_ends_alike(pool, spec):
    for same, apart, finished, notes in pool.run(4, whole_and_resumed, spec, 8, 6):
        assert same
        assert not apart
        assert finished
        assert notes["rounds"] >= 2


def at_paces_of_their_own():
    """Train for a while, rank 0 slowly. Its state may be saved on the way; steps, rounds, the model."""
    model, optimizer = pair("lsgd(every=4, local_every=4, ranks_per_node=1, count='total')")
    steps = 0
    for until in (2, 4):  # meetings
        while optimizer.notes().get("rounds", 0) < until:
            go(model, optimizer, range(steps, steps + 1))
            steps += 1
            time.sleep(0.1 if dist.get_rank() == 0 else 0.001)
        saved = optimizer.state_dict()  # by all ranks, each after a number of steps of its own
        optimizer.load_state_dict(saved)
    rounds = optimizer.notes()["rounds"]
    go(model, optimizer, range(steps, steps + dist.get_rank()))
    optimizer.finish()
    end = agree(model), steps, rounds, optimizer.stats().steps
    optimizer.remove()
    return end


def average_and_end(spec, steps=5):
    """Whether `averaged` shows what `finish` leaves, twice alike, and changes nothing; or the own model."""
    model, optimizer = pair(spec)
    go(model, optimizer, range(steps))
    before = flat(model)
    with optimizer.averaged():
        shown = flat(model)
    same = torch.equal(flat(model), before)
    with optimizer.averaged():
        again = flat(model)
    optimizer.finish()
    return torch.equal(shown, flat(model)), torch.equal(shown, again), same, torch.equal(shown, before)


@pytest.mark.parametrize(
    "spec", ["diloco(every=4, overlap=3)", "diloco(every=4, fragments=2, overlap=3, mix=0.5)"]
)
def test_the_average_has_what_is_on_its_way(pool, spec):
    assert pool.run(2, average_and_end, spec) == [(True, True, True, False)] * 2


def sends_infinity(model, optimizer, step):
    """A step after which a weight of rank 1 is Inf as it is sent, and as before afterwards."""
    first = next(model.parameters()).data
    loss_of(model, step).backward()
    kept = first.clone()
    if dist.get_rank() == 1:
        first.fill_(torch.inf)
    optimizer.step()
    first.copy_(kept)


def recovered(spec):
    """An outer gradient of one rank is Inf; the state of before is loaded, and training goes on from it."""
    ends = []
    for fault in (False, True):
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)  # without decay, which would take Inf up
        model, optimizer = laconic.distribute(model, plain, spec)
        go(model, optimizer, range(3))
        saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        if fault:
            with pytest.raises(NonFiniteError, match="an outer gradient is not finite"):
                sends_infinity(model, optimizer, 3)
                go(model, optimizer, range(4, 20))
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[0])
        go(model, optimizer, range(3, 20))
        optimizer.finish()
        ends.append(flat(model))
    return torch.equal(*ends)


@pytest.mark.parametrize(
    "spec",
    ["diloco(every=4)", "diloco(every=4, overlap=2)", "diloco(every=4, fragments=2, overlap=3, mix=0.5)"],
)
def test_after_a_step_that_is_void_a_saved_state_goes_on(pool, spec):
    assert pool.run(2, recovered, spec) == [True, True]


def left_behind(spec):
    """After `remove()`: whether ranks agree, in float32 and in 16 bits, when all was still on its way."""
    torch.manual_seed(0)
    parts = nn.ParameterDict({"brief": torch.ones(5, dtype=torch.bfloat16), "long": torch.ones(5)})
    model, optimizer = laconic.distribute(parts, torch.optim.SGD(parts.parameters(), lr=1.0), spec)
    for _ in range(3):
        for each in model.parameters():
            each.grad = torch.full_like(each, dist.get_rank() + 1.0)
        optimizer.step()
    optimizer.remove()
    return [each.detach().float().tolist() for each in model.parameters()]


def test_remove_leaves_in_16_bits_too_what_was_on_its_way(pool):
    found = pool.run(2, left_behind, "diloco(every=3, overlap=2, lr=1.0, momentum=0.0)")
    assert found == [[[-3.5] * 5] * 2] * 2


def test_a_slow_rank_does_fewer_steps_and_ranks_end_as_they_like(pool):
    found = pool.run(3, at_paces_of_their_own)
    assert all(alike for alike, *_ in found)
    assert [rounds for *_, rounds, _ in found] == [4, 4, 4]
    assert sum(steps for _, steps, *_ in found) == 4 * 3 * 4
    assert found[0][1] < min(found[1][1], found[2][1])
    assert [counted - steps for _, steps, _, counted in found] == [0, 1, 2]


def silent(told_by):
    """The error of this rank where only some tell their losses."""
    model, optimizer = pair("lsgd(every=2, local_every=2, ranks_per_node=2)")
    try:
        for step in range(2):
            loss_of(model, step).backward()
            if dist.get_rank() in told_by:
                optimizer.step(lambda: 1.0)
            else:
                optimizer.step()
    except LaconicError as error:
        return type(error), str(error)
    return type(None), ""


def test_a_loss_that_one_rank_does_not_tell_is_missed_on_all(pool):
    for kind, text in pool.run(4, silent, (0, 1, 3)):
        assert kind is AttachError
        assert "rank 2 has noted no loss" in text
    for kind, _ in pool.run(2, silent, (0, 1)):
        assert kind is type(None)


def without_machines():
    try:
        pair("lsgd()")
    except LaconicError as error:
        return str(error)


def test_machines_that_nobody_told_of_are_asked_for(pool):
    for text in pool.run(2, without_machines):
        assert "set ranks_per_node= to the number of ranks per machine" in text
