"""Steps of the optimiser of `laconic.distribute`: scaled, not finite, told a loss."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from laconic.core.errors import NonFiniteError, StateError
from laconic.strategies.controller import GradientController
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from tests.dist.distribute_world import pair
from tests.dist.nets import SGD, agree, flat, loss_of


def schedule_and_scaler():
    """A rank whose gradient overflows skips its update and still averages; a schedule goes on."""
    model, optimizer = pair("local_sgd(every=2)")
    schedule, scaler = (
        LambdaLR(optimizer, lambda step: 0.5**step),
        torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    before = flat(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (torch.inf if dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            unmoved = torch.equal(flat(model), before)
        schedule.step()
    return unmoved, agree(model), optimizer.param_groups[0]["lr"], scaler.get_scale()


def test_a_scaler_skips_the_update_of_one_rank_and_no_meeting(pool):
    (unmoved, same, rate, scale), (moved, _, _, other) = pool.run(2, schedule_and_scaler)
    assert unmoved
    assert not moved
    assert same
    assert rate == pytest.approx(SGD["lr"] / 4)
    assert (scale, other) == (2.0, 8.0)


def scaled_and_plain():
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)):
        model, optimizer = pair("local_sgd(every=2)")
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(flat(model))
    return torch.equal(*ends)


def test_a_scale_leaves_no_trace(pool):
    assert pool.run(2, scaled_and_plain) == [True, True]


def not_finite():
    model, optimizer = pair("local_sgd(every=5)")
    before = flat(model)
    (loss_of(model, 0) * torch.nan).backward()
    try:
        optimizer.step()
    except NonFiniteError as error:
        return str(error), torch.equal(flat(model), before)


def test_a_gradient_that_is_not_finite_changes_no_parameter(pool):
    for text, unchanged in pool.run(2, not_finite):
        assert "update was skipped" in text
        assert unchanged


class Told(GradientController):
    """Keeps the losses that it is told."""

    def __init__(self):
        self.losses = []

    def step(self, update, loss):
        self.losses.append(loss)
        update()


def test_a_loss_is_told_by_hand_or_by_a_closure_as_it_is():
    weight, controller = torch.ones((), requires_grad=True), Told()
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), controller)

    def closure():
        loss = weight * 2
        loss.backward()
        return loss

    optimizer.note_loss(closure())
    optimizer.step()
    optimizer.step(closure)
    optimizer.step()
    assert controller.losses == [2.0, 0.0, None]


def caught_and_gone_on(spec):
    """The pattern of docs/faults.md: rank 0 catches, and goes on with its next batch."""
    model, optimizer = pair(spec)
    caught = 0
    for step in range(7):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (torch.inf if step == 2 and dist.get_rank() == 0 else 1.0)
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError:
            caught += 1
            optimizer.zero_grad()
    optimizer.finish()
    return caught, optimizer.stats().steps, agree(model)


@pytest.mark.parametrize("spec", ["sgp()", "osgp()", "local_sgd(every=2)", "adpsgd()"])
def test_a_rank_that_catches_and_goes_on_keeps_step_with_the_others(pool, spec):
    assert pool.run(2, caught_and_gone_on, spec) == [(1, 7, True), (0, 7, True)]


def one_refuses():
    """Rank 1 loads a state of another seed."""
    model, optimizer = pair("sgp()")
    state = optimizer.state_dict()
    state["laconic"]["seed"] = dist.get_rank()
    before = flat(model)
    with pytest.raises(StateError) as caught:
        optimizer.load_state_dict(state)
    return str(caught.value), torch.equal(flat(model), before)


def test_if_one_rank_refuses_its_state_no_rank_loads(pool):
    first, second = pool.run(2, one_refuses)
    assert "rank 1 says" in first[0] and "seed 1" in second[0]
    assert first[1] and second[1]
