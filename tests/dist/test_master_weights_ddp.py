"""Master weights under DDP, `laconic.compress` and `laconic.distribute`: equal on all ranks, resumable."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import laconic
from laconic.core.errors import AttachError
from laconic.optim import master_weights
from laconic.optim.master_weights import masters_of
from tests.dist.ddp_world import MANY
from tests.dist.nets import SGD, agree, batch, compress_anyway, flat, net

METHODS = (None, "dense()", "topk(density=0.1)", "dgc(density=0.1)", "cgx(bits=8)", "powersgd(rank=2)")
ADAM = ("onebit_adam(warmup_steps=3)", "zero_one_adam(freeze_steps=3, kappa=1, double_every=2, longest=2)")


def loss_of(model, step):
    x, y = batch(dist.get_rank(), step)
    half = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(half)).float(), y)


def built(spec, rounding="nearest", dtype=torch.bfloat16, seed=0):
    model = DistributedDataParallel(net(seed).to(dtype), **MANY)
    made = torch.optim.AdamW(model.parameters(), lr=1e-3) if spec in ADAM else None
    optimizer = master_weights(made or torch.optim.SGD(model.parameters(), **SGD), rounding=rounding)
    return model, optimizer, None if spec is None else compress_anyway(model, optimizer, spec)


def same_masters(optimizer):
    """Whether the masters of all ranks are equal, and their parameters are them, rounded."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    masters = [masters_of(optimizer).of(each) for each in held]
    rounded = all(torch.equal(m.to(p.dtype), p) for m, p in zip(masters, held, strict=True))
    mine = torch.cat([each.flatten() for each in masters])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return rounded and all(torch.equal(mine, other) for other in every)


def trained(spec, rounding, clipped):
    model, optimizer, handle = built(spec, rounding)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        if clipped:
            clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    equal = agree(model) and (rounding == "stochastic" or same_masters(optimizer))
    if handle is not None:
        handle.remove()
    return equal, agree(model), losses


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("spec", [*METHODS, *ADAM])
def test_replicas_and_their_masters_stay_equal_and_learn(pool, spec, rounding):
    """Twelve steps on one batch; 0/1 Adam meets at the last."""
    for equal, after, losses in pool.run(2, trained, spec, rounding, False):
        assert equal and after
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("spec", [None, "dense()", "topk(density=0.1)", "cgx(bits=8)"])
def test_clipping_of_16_bit_gradients_reaches_the_masters(pool, spec):
    for equal, _, losses in pool.run(2, trained, spec, "nearest", True):
        assert equal and losses[-1] < losses[0]


def one_weight(spec, clip):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(torch.bfloat16))
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1.0))
    weight = model.module.weight
    with torch.no_grad():
        weight.fill_(0.0)
    if spec is not None:
        laconic.compress(model, optimizer, spec)
    x = torch.tensor([[1.0 + dist.get_rank() / 128]], dtype=torch.bfloat16)
    model(x).sum().backward()
    if clip:
        clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return masters_of(optimizer).of(weight).item(), weight.item()


@pytest.mark.parametrize("size", [2, 4])
def test_masters_get_the_mean_in_float32(pool, size):
    """Gradients 1, 1 + 1/128, ...: bfloat16 has no number for their mean. A clipped one comes as it is."""
    mean = sum(1 + rank / 128 for rank in range(size)) / size
    for master, weight in pool.run(size, one_weight, "dense()", False):
        assert master == -mean
        assert weight == torch.tensor(-mean).to(torch.bfloat16).item() != -mean
    for master, _ in pool.run(size, one_weight, "dense()", True):
        assert abs(master + 0.5) < 2**-8


def stop_and_go(spec, rounding):
    """Eight steps, and four then four in new objects."""
    ends = []
    model, optimizer, handle = built(spec, rounding)
    for step in range(8):
        if step == 4:
            file = io.BytesIO()
            memory = None if handle is None else handle.state_dict()
            torch.save((model.module.state_dict(), optimizer.state_dict(), memory), file)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    ends.append(flat(model))
    file.seek(0)
    weights, state, memory = torch.load(file, weights_only=True)
    model, optimizer, handle = built(spec, rounding, seed=9)
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    if handle is not None:
        handle.load_state_dict(memory)
    for step in range(4, 8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [*ends, flat(model)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("spec", [None, "dgc(density=0.1)", "onebit_adam(warmup_steps=3)"])
def test_a_resumed_run_does_the_same_bits(pool, spec, rounding):
    for whole, resumed in pool.run(2, stop_and_go, spec, rounding):
        assert torch.equal(whole, resumed)


def strategy_stop_and_go(spec):
    """Eight steps, and four then four in new objects: this rank's float32 weights."""

    def begun(seed):
        model = net(seed).to(torch.bfloat16)
        optimizer = master_weights(torch.optim.SGD(model.parameters(), **SGD))
        return laconic.distribute(model, optimizer, spec)

    ends = []
    model, optimizer = begun(0)
    for step in range(8):
        if step == 4:
            file = io.BytesIO()
            state = optimizer.state_dict()
            torch.save((model.state_dict(), state), file)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    ends.append(optimizer.controller.replica.flat.clone())
    optimizer.remove()
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model, optimizer = begun(9)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    for step in range(4, 8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [*ends, optimizer.controller.replica.flat.clone()]


@pytest.mark.parametrize("spec", ["local_sgd(every=3, compressor=sign())", "sgp()", "diloco(every=3)"])
def test_a_resumed_strategy_does_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, strategy_stop_and_go, spec):
        assert torch.equal(whole, resumed)


def small_steps(spec, rounding, steps):
    """A thousand weights at 1 and updates of 1e-4; the group's model at the end, and float32's."""
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if rounding is not None:
        master_weights(optimizer, rounding=rounding, seed=dist.get_rank())
    _, optimizer = laconic.distribute(model, optimizer, spec)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.finish()
    own = optimizer.controller.replica.flat.clone()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.remove()
    return own.mean().item(), torch.equal(own.to(torch.bfloat16), weight.detach())


@pytest.mark.parametrize("spec", ["local_sgd(every=4)", "diloco(every=8, lr=1.0, momentum=0.0)", "sgp()"])
def test_a_strategy_and_its_masters_are_one_copy(pool, spec):
    """160 updates of 1e-4: bfloat16 alone loses all of them, masters none, and rounding at random none on
    average: five standard deviations of the mean of 1,000 weights are 0.002.
    """
    for rounding, expected, tolerance in (
        (None, 1.0, 0),
        ("nearest", 0.984, 1e-5),
        ("stochastic", 0.984, 2e-3),
    ):
        for mean, published in pool.run(2, small_steps, spec, rounding, 160):
            assert abs(mean - expected) <= tolerance
            assert published


def sharded(spec):
    """A model in bfloat16 under fully_shard: its masters are sharded too."""
    model = net().to(torch.bfloat16)
    fully_shard(model)
    optimizer = master_weights(torch.optim.SGD(model.parameters(), **SGD))
    if spec is not None:
        laconic.compress(model, optimizer, spec)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with pytest.raises(AttachError, match="these parameters are sharded"):
        master_weights(torch.optim.SGD(model.parameters(), lr=0.1), rounding="stochastic")
    shards = [each.to_local().numel() for each in model.parameters()]
    masters = [masters_of(optimizer).of(each).to_local().numel() for each in model.parameters()]
    return losses, shards == masters


@pytest.mark.parametrize("spec", [None, "cgx(bits=8)"])
def test_masters_of_a_sharded_model_are_shards(pool, spec):
    for losses, equal in pool.run(2, sharded, spec, timeout_s=240):
        assert equal and losses[-1] < 0.9 * losses[0]
