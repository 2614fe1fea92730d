"""LGC in real processes over gloo: the net is trained on the communication thread, beside DDP's backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.ddp_world import MANY, spike
from tests.dist.nets import SGD, agree, flat, loss_of, net, train

RING = "lgc(density=0.05, dense_steps=1, train_steps=3)"
SERVER = "lgc(density=0.05, dense_steps=1, train_steps=3, instance='server')"
both = pytest.mark.parametrize("spec", [RING, SERVER])


@both
@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_stay_bit_identical_through_all_phases(pool, spec, size):
    for parameters, same, stats in pool.run(size, train, spec, 8):
        assert same and parameters.isfinite().all() and stats.steps == 8


@both
def test_buckets_that_are_regrouped_keep_replicas_alike(pool, spec):
    for parameters, same, _ in pool.run(2, many_buckets, spec):
        assert same and parameters.isfinite().all()


def many_buckets(spec):
    return train(spec, 8, **MANY)


def stop_and_go(spec, stop):
    """Eight steps in one bucket, and `stop` of them then the rest with new objects."""
    whole, state, saved = train(spec, 8)[0], None, None
    for first, last in ((0, stop), (stop, 8)):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        handle = laconic.compress(model, optimizer, spec)
        if state is not None:
            model.module.load_state_dict(state)
            optimizer.load_state_dict(saved[0])
            handle.load_state_dict(saved[1])
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        state, saved = model.module.state_dict(), (optimizer.state_dict(), handle.state_dict())
    return whole, flat(model)


@both
@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_run_ends_with_the_same_bits(pool, spec, stop):
    """Within training, between the last lesson and the first code, and among the codes."""
    for whole, resumed in pool.run(2, stop_and_go, spec, stop):
        assert torch.equal(whole, resumed)


def overflow(spec, when):
    """Inf on rank 1 at one step, in the bucket that comes last: earlier ones have been exchanged by then."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    handle = laconic.compress(model, optimizer, spec, scaler=scaler)
    for step in range(7):
        before = nets_of(handle)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and dist.get_rank() == 1:
            loss = loss + spike(next(model.parameters()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = nets_of(handle)
        learned = not all(torch.equal(value, after[key]) for key, value in before.items())
        assert learned == (1 <= step < 4 and step != when)
        assert all(bool(value.isfinite().all()) for value in handle.state_dict()["tensors"].values())
    return agree(model), scaler.get_scale()


def nets_of(handle):
    tensors = handle.state_dict()["tensors"]
    return {key: value for key, value in tensors.items() if "/once/autoencoder/" in key}


@both
@pytest.mark.parametrize("when", [2, 5])
def test_inf_in_the_last_bucket_teaches_the_net_nothing(pool, spec, when):
    assert pool.run(2, overflow, spec, when) == [(True, 512.0)] * 2
