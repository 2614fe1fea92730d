"""Master weights under DDP, `laconic.compress` and `laconic.distribute`: equal on all ranks, resumable."""

from __future__ import annotations

from itertools import product

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
from tests.dist.nets import SGD, agree, batch, compress_anyway, flat, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance, stop_and_go

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


def learns(spec, rounding):
    """Twelve steps on one batch; 0/1 Adam meets at the last."""
    equal, after, losses = trained(spec, rounding, False)
    assert equal and after and losses[-1] < 0.9 * losses[0]


@on_ranks(
    2, [*((spec, "nearest") for spec in (*METHODS, *ADAM)), ("cgx(bits=8)", "stochastic")], timeout_s=300
)
def test_replicas_and_their_masters_stay_equal_and_learn(spec, rounding):
    learns(spec, rounding)


@pytest.mark.nightly
@on_ranks(2, product((*METHODS, *ADAM), ("nearest", "stochastic")), timeout_s=600)
def test_replicas_and_their_masters_stay_equal_and_learn_in_any_rounding(spec, rounding):
    learns(spec, rounding)


@on_ranks(2, (None, "dense()", "topk(density=0.1)", "cgx(bits=8)"))
def test_clipping_of_16_bit_gradients_reaches_the_masters(spec):
    equal, _, losses = trained(spec, "nearest", True)
    assert equal and losses[-1] < losses[0]


@on_ranks((2, 4), (False, True))
def test_masters_get_the_mean_in_float32(clip):
    """Gradients 1, 1 + 1/128, ...: bfloat16 has no number for their mean. A clipped one comes as it is."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(torch.bfloat16))
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1.0))
    weight = model.module.weight
    with torch.no_grad():
        weight.fill_(0.0)
    laconic.compress(model, optimizer, "dense()")
    model(torch.tensor([[1.0 + dist.get_rank() / 128]], dtype=torch.bfloat16)).sum().backward()
    if clip:
        clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    size, master = dist.get_world_size(), masters_of(optimizer).of(weight).item()
    mean = sum(1 + rank / 128 for rank in range(size)) / size
    if clip:
        assert abs(master + 0.5) < 2**-8
    else:
        assert master == -mean
        assert weight.item() == torch.tensor(-mean).to(torch.bfloat16).item() != -mean


def train(model, optimizer, steps):
    advance(model, optimizer, steps, loss_of)


@on_ranks(2, product(("nearest", "stochastic"), (None, "dgc(density=0.1)", "onebit_adam(warmup_steps=3)")))
def test_a_resumed_run_does_the_same_bits(rounding, spec):
    (whole, *_), (model, *_) = stop_and_go(lambda again: built(spec, rounding, seed=9 * again), 8, 4, train)
    assert torch.equal(flat(whole), flat(model))


@on_ranks(2, ("local_sgd(every=3, compressor=sign())", "sgp()", "diloco(every=3)"))
def test_a_resumed_strategy_does_the_same_bits(spec):
    """This rank's float32 weights."""

    def begun(again):
        model = net(9 * again).to(torch.bfloat16)
        optimizer = master_weights(torch.optim.SGD(model.parameters(), **SGD))
        return laconic.distribute(model, optimizer, spec)

    (_, whole), (_, optimizer) = stop_and_go(begun, 8, 4, train)
    assert torch.equal(whole.controller.replica.flat, optimizer.controller.replica.flat)


COPIES = ("local_sgd(every=4)", "diloco(every=8, lr=1.0, momentum=0.0)", "sgp()")
ROUNDINGS = ((None, 1.0, 0), ("nearest", 0.984, 1e-5), ("stochastic", 0.984, 2e-3))


@on_ranks(2, [(spec, *rounding) for spec in COPIES for rounding in ROUNDINGS])
def test_a_strategy_and_its_masters_are_one_copy(spec, rounding, expected, tolerance):
    """160 updates of 1e-4: bfloat16 alone loses all of them, masters none, and rounding at random none on
    average: five standard deviations of the mean of 1,000 weights are 0.002.
    """
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if rounding is not None:
        master_weights(optimizer, rounding=rounding, seed=dist.get_rank())
    _, optimizer = laconic.distribute(model, optimizer, spec)
    for _ in range(160):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.finish()
    own = optimizer.controller.replica.flat.clone()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.remove()
    assert abs(own.mean().item() - expected) <= tolerance
    assert torch.equal(own.to(torch.bfloat16), weight.detach())


@on_ranks(2, [None, "cgx(bits=8)"])
def test_masters_of_a_sharded_model_are_shards(spec):
    model = net().to(torch.bfloat16)
    fully_shard(model)
    optimizer = master_weights(torch.optim.SGD(model.parameters(), **SGD))
    if spec is not None:
        laconic.compress(model, optimizer, spec)
    losses = advance(model, optimizer, [0] * 8, loss_of)
    with pytest.raises(AttachError, match="these parameters are sharded"):
        master_weights(torch.optim.SGD(model.parameters(), lr=0.1), rounding="stochastic")
    shards = [each.to_local().numel() for each in model.parameters()]
    masters = [masters_of(optimizer).of(each).to_local().numel() for each in model.parameters()]
    assert (shards == masters) and losses[-1] < 0.9 * losses[0]
