"""Steps of the optimiser of `laconic.distribute`: scaled, not finite, told a loss."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from laconic.core.errors import NonFiniteError
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


def test_a_gradient_that_is_not_finite_changes_nothing(pool):
    for text, unchanged in pool.run(2, not_finite):
        assert "nothing was changed" in text
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
