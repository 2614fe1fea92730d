"""Laws of the strategies that depend on clocks: no two runs are alike, and threads as ranks cannot play them.

Those of all others are in `tests/laws/test_strategies.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import NonFiniteError
from laconic.core.spec import parse
from laconic.strategies.strategy import Strategy
from tests.dist.nets import agree, flat
from tests.dist.pool import on_ranks
from tests.laws.table import specs
from tests.unit.strategy_world import Numbers, gradient, sgd

SPECS = [spec for spec in specs(Strategy) if parse(spec).clocked]
SIZE = 4
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # float32, over a dozen steps of numbers around 1


def long(spec):
    """Steps in which ranks talk a few times."""
    return 8 + parse(spec).period


def pair(spec, lr=0.1):
    model = Numbers()
    return laconic.distribute(model, sgd(model, (lr, lr)), spec)


def give(model, optimizer, step):
    slope = gradient(flat(model), dist.get_rank(), step)
    for each, part in zip(
        model.parameters(), slope.split([p.numel() for p in model.parameters()]), strict=True
    ):
        each.grad = part.view_as(each)
    optimizer.note_loss(float(slope.norm()))


def train(model, optimizer, steps):
    for step in steps:
        give(model, optimizer, step)
        optimizer.step()


def ended(model, optimizer):
    """Whether all ranks have one finite model after `finish`."""
    optimizer.finish()
    same = agree(model)
    optimizer.remove()
    return same


def side_by_side(spec, other):
    """Two strategies in one process group, in turns."""
    pairs = pair(spec), pair(other)
    for step in range(long(spec)):
        for each in pairs:
            train(*each, [step])
    return tuple(ended(*each) for each in pairs)


@on_ranks(SIZE, SPECS)
def test_a_run_is_taken_over_and_ends_alike(spec):
    first, second = pair(spec), pair(spec)
    train(*first, range(long(spec)))
    saved = first[1].state_dict()
    model = flat(first[0])
    second[1].load_state_dict(saved)
    same = torch.equal(model, flat(second[0]))
    train(*second, range(long(spec), long(spec) + 6))
    assert same and ended(*second) and ended(*first)


@on_ranks(SIZE, SPECS)
def test_a_gradient_that_is_not_finite_is_skipped_and_nobody_waits_in_vain(spec):
    """One rank's gradient overflows: it skips the update, talks and is told."""
    model, optimizer = pair(spec)
    train(model, optimizer, range(4))
    give(model, optimizer, 4)
    told = dist.get_rank() != 1
    if not told:
        next(model.parameters()).grad[0, 0] = torch.inf
        try:
            optimizer.step()
        except NonFiniteError as error:
            told = "update was skipped" in str(error)
        optimizer.zero_grad()
    else:
        optimizer.step()
    train(model, optimizer, range(5, long(spec)))
    assert told and ended(model, optimizer)


def partners(spec):
    """Strategies that may share a training loop with this one."""
    waits_for_no_one = SPECS[0]
    return [waits_for_no_one] if getattr(parse(spec), "count", "") == "total" else ["sgp()", waits_for_no_one]


@pytest.mark.parametrize("spec", SPECS)
def test_two_strategies_side_by_side_both_end_alike(pool, spec):
    for other in partners(spec):
        assert pool.run(SIZE, side_by_side, spec, other) == [(True, True)] * SIZE


@on_ranks(SIZE, [spec for spec in SPECS if parse(spec).keeps_mean])
def test_talking_alone_keeps_the_mean(spec):
    """At a rate of 0, from models that differ: how far the group's model is from their mean."""
    model, optimizer = pair(spec)
    train(model, optimizer, range(3))
    with optimizer.averaged():
        mean = flat(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(3, long(spec)))
    optimizer.finish()
    end = flat(model)
    optimizer.remove()
    torch.testing.assert_close(end, mean, **ROUNDING)
