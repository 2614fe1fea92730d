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

ONE = "onebit_adam(warmup_steps=4)"
ZERO = "zero_one_adam(freeze_steps=4, kappa=1, double_every=3, longest=3)"
SPECS = [ONE, ZERO]


def built(spec, **ddp):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, laconic.compress(model, optimizer, spec)


def go(model, optimizer, steps, zeros_from=None, schedule=None):
    """Steps of a script; from `zeros_from` on with a loss whose gradients are all zero."""
    for step in range(steps):
        optimizer.zero_grad()
        silent = zeros_from is not None and step >= zeros_from
        (loss_of(model, step) * (0.0 if silent else 1.0)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def moments(optimizer):
    kinds = ("exp_avg", "exp_avg_sq")
    return torch.cat([state[kind].flatten() for state in optimizer.state.values() for kind in kinds])


def same_everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(each, tensor) for each in parts)


def uneven(spec, own_steps, more):
    """Ranks with so many batches each; then some steps more without Join. And a twin with zero gradients."""
    rank, most = dist.get_rank(), max(own_steps)
    model, optimizer, handle = built(spec)
    with Join([model, handle]):
        go(model, optimizer, own_steps[rank])
    ends = [agree(model), same_everywhere(moments(optimizer)), handle.stats().steps == most]
    twin, twin_optimizer, twin_handle = built(spec)
    go(twin, twin_optimizer, most, zeros_from=own_steps[rank])
    close = torch.dist(flat(model), flat(twin)) / torch.dist(flat(twin), flat(net()))
    go(model, optimizer, more)
    handle.remove()
    twin_handle.remove()
    return [*ends, agree(model)], float(close)


@pytest.mark.parametrize("own_steps", [(9, 3), (2, 9), (12, 7), (5, 5), (0, 6)])
def test_onebit_adam_goes_on_as_with_gradients_of_zero(pool, own_steps):
    """But for rounding: what a rank without inputs adds is zero, before and after the warm-up."""
    for ends, apart in pool.run(2, uneven, ONE, own_steps, 3):
        assert ends == [True] * 4
        assert apart < 1e-4


@pytest.mark.parametrize("own_steps", [(12, 3), (2, 12), (14, 7, 9)])
def test_zero_one_adam_ends_at_a_round(pool, own_steps):
    for ends, _ in pool.run(len(own_steps), uneven, ZERO, own_steps, 3):
        assert ends == [True] * 4


def scheduled(spec):
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
    equal = agree(model), same_everywhere(moments(optimizer))
    handle.remove()
    return *equal, handle.stats().steps


@pytest.mark.parametrize("spec", SPECS)
def test_schedules_clipping_and_accumulation_leave_replicas_equal(pool, spec):
    assert pool.run(2, scheduled, spec) == [(True, True, 12)] * 2


def distributed(spec):
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    model, optimizer = laconic.distribute(plain, optimizer, spec)
    with Join([model, optimizer]):
        go(model, optimizer, 9 - 4 * dist.get_rank())
    return agree(model), optimizer.stats().steps


@pytest.mark.parametrize("spec", SPECS)
def test_the_optimiser_of_distribute_joins_for_its_handle(pool, spec):
    assert pool.run(2, distributed, spec) == [(True, 9)] * 2


def refusals():
    said = []
    for order in ("model alone", "handle first", "model alone the second time"):
        model, optimizer, handle = built(ONE)
        if order.endswith("time"):
            with Join([model, handle]):
                go(model, optimizer, 2)
        joinables = {"handle first": [handle, model]}.get(order, [model])
        with pytest.raises(AttachError) as caught, Join(joinables):
            go(model, optimizer, 2)
        said.append(str(caught.value))
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model, optimizer, handle = built(ONE, **options)
        with pytest.raises(AttachError) as caught:
            Join([model, handle])
        said.append(str(caught.value))
    return said


def test_what_would_hang_is_refused_with_the_way_out(pool):
    for said in pool.run(2, refusals):
        assert all("Join([model, handle])" in each for each in said[:3])
        assert all("without find_unused_parameters" in each for each in said[3:])
