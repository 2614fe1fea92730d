"""1-bit and 0/1 Adam with uneven inputs: a rank that has run out of them goes on with the others' steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance

ONE = "onebit_adam(warmup_steps=4)"
ZERO = "zero_one_adam(freeze_steps=4, kappa=1, double_every=3, longest=3)"
SPECS = [ONE, ZERO]


def built(spec, **ddp):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, laconic.compress(model, optimizer, spec)


def moments(optimizer):
    kinds = ("exp_avg", "exp_avg_sq")
    return torch.cat([state[kind].flatten() for state in optimizer.state.values() for kind in kinds])


def same_everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(each, tensor) for each in parts)


def ends_alike(spec, own_steps):
    """Check ranks with so many batches each, then three steps without Join; the distance to a twin.

    The twin has gradients of zero in place of none.
    """
    rank, most = dist.get_rank(), max(own_steps)
    model, optimizer, handle = built(spec)
    with Join([model, handle]):
        advance(model, optimizer, own_steps[rank])
    assert agree(model) and same_everywhere(moments(optimizer)) and handle.stats().steps == most
    twin, twin_optimizer, twin_handle = built(spec)
    advance(twin, twin_optimizer, most, lambda model, step: loss_of(model, step) * (step < own_steps[rank]))
    apart = torch.dist(flat(model), flat(twin)) / torch.dist(flat(twin), flat(net()))
    advance(model, optimizer, 3)
    handle.remove()
    twin_handle.remove()
    assert agree(model)
    return apart


@on_ranks(2, ((9, 3), (2, 9), (12, 7), (5, 5), (0, 6)))
def test_onebit_adam_goes_on_as_with_gradients_of_zero(*own_steps):
    """But for rounding: what a rank without inputs adds is zero, before and after the warm-up."""
    assert ends_alike(ONE, own_steps) < 1e-4


@on_ranks(2, ((12, 3), (2, 12)))
def test_zero_one_adam_ends_at_a_round(*own_steps):
    ends_alike(ZERO, own_steps)


@on_ranks(3)
def test_zero_one_adam_on_three_ranks_ends_at_a_round():
    ends_alike(ZERO, (14, 7, 9))


@on_ranks(2, SPECS)
def test_schedules_clipping_and_accumulation_leave_replicas_equal(spec):
    """The rate falls and gradients are clipped only where there are inputs."""
    model, optimizer, handle = built(spec)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Join([model, handle]):
        for step in range(12 if dist.get_rank() else 5):
            optimizer.zero_grad()
            with model.no_sync():
                (loss_of(model, step) / 2).backward()
            (loss_of(model, step + 100) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
    assert agree(model) and same_everywhere(moments(optimizer))
    handle.remove()
    assert handle.stats().steps == 12


@on_ranks(2, SPECS)
def test_the_optimiser_of_distribute_joins_for_its_handle(spec):
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    model, optimizer = laconic.distribute(plain, optimizer, spec)
    with Join([model, optimizer]):
        advance(model, optimizer, 9 - 4 * dist.get_rank())
    assert agree(model) and optimizer.stats().steps == 9


@on_ranks(2)
def test_what_would_hang_is_refused_with_the_way_out():
    said = []
    for order in ("model alone", "handle first", "model alone the second time"):
        model, optimizer, handle = built(ONE)
        if order.endswith("time"):
            with Join([model, handle]):
                advance(model, optimizer, 2)
        joinables = {"handle first": [handle, model]}.get(order, [model])
        with pytest.raises(AttachError) as caught, Join(joinables):
            advance(model, optimizer, 2)
        said.append(str(caught.value))
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model, optimizer, handle = built(ONE, **options)
        with pytest.raises(AttachError) as caught:
            Join([model, handle])
        said.append(str(caught.value))
    assert all("Join([model, handle])" in each for each in said[:3])
    assert all("without find_unused_parameters" in each for each in said[3:])
