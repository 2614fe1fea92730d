"""Steps of the optimiser of `laconic.distribute`: scaled, not finite, told a loss."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from laconic.core.errors import NonFiniteError, StateError
from laconic.strategies.controller import GradientController
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from tests.dist.nets import SGD, agree, flat, loss_of
from tests.dist.pool import on_ranks
from tests.dist.runs import distributed, scaled_step


@on_ranks(2)
def test_a_scaler_skips_the_update_of_one_rank_and_no_meeting():
    """A rank whose gradient overflows skips its update and still averages; a schedule goes on."""
    model, optimizer = distributed("local_sgd(every=2)")
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before, first = flat(model), dist.get_rank() == 0
    for step in range(2):
        optimizer.zero_grad()
        scaled_step(scaler, optimizer, loss_of(model, step) * (torch.inf if first else 1.0))
        assert torch.equal(flat(model), before) == first or step
        schedule.step()
    assert agree(model)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(SGD["lr"] / 4)
    assert scaler.get_scale() == (2.0 if first else 8.0)


@on_ranks(2)
def test_a_scale_leaves_no_trace():
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)):
        model, optimizer = distributed("local_sgd(every=2)")
        for step in range(4):
            optimizer.zero_grad()
            scaled_step(scaler, optimizer, loss_of(model, step))
        ends.append(flat(model))
    assert torch.equal(*ends)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_changes_no_parameter():
    model, optimizer = distributed("local_sgd(every=5)")
    before = flat(model)
    (loss_of(model, 0) * torch.nan).backward()
    with pytest.raises(NonFiniteError, match="update was skipped"):
        optimizer.step()
    assert torch.equal(flat(model), before)


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


@on_ranks(2, ("sgp()", "osgp()", "local_sgd(every=2)", "adpsgd()"))
def test_a_rank_that_catches_and_goes_on_keeps_step_with_the_others(spec):
    """The pattern of docs/faults.md: rank 0 catches, and goes on with its next batch."""
    model, optimizer = distributed(spec)
    for step in range(7):
        optimizer.zero_grad()
        bad = step == 2 and dist.get_rank() == 0
        (loss_of(model, step) * (torch.inf if bad else 1.0)).backward()
        with pytest.raises(NonFiniteError) if bad else nullcontext():
            optimizer.step()
    optimizer.finish()
    assert optimizer.stats().steps == 7 and agree(model)
    optimizer.remove()


@on_ranks(2)
def test_if_one_rank_refuses_its_state_no_rank_loads():
    """Rank 1 loads a state of another seed."""
    model, optimizer = distributed("sgp()")
    state = optimizer.state_dict()
    state["laconic"]["seed"] = dist.get_rank()
    before = flat(model)
    with pytest.raises(StateError, match="seed 1" if dist.get_rank() else "rank 1 says"):
        optimizer.load_state_dict(state)
    assert torch.equal(flat(model), before)
