"""Gradients under DDP that are not finite on one rank, and scaled ones."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import NonFiniteError
from tests.dist.composition import Words
from tests.dist.ddp_world import MANY, spike
from tests.dist.nets import SGD, agree, flat, loss_of, net


def overflow(scaled, when):
    """Inf on rank 1 at one step, in one of many buckets."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) if scaled else None
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)", scaler=scaler)
    parameters, errors = [flat(model)], []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and dist.get_rank() == 1:
            weight = next(p for p in model.parameters() if p.ndim > 1)
            loss = loss + spike(weight)
        if scaler is None:
            loss.backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                errors.append(str(error))
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        parameters.append(flat(model))
    memory = handle.state_dict()["tensors"]
    finite = all(bool(value.isfinite().all()) for value in memory.values())
    return parameters, finite, agree(model), errors, None if scaler is None else scaler.get_scale()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_inf_on_one_rank_skips_the_step_on_all(pool, scaled, when):
    """Also in the first step, and in the next, when DDP has just regrouped its buckets."""
    for parameters, finite, same, errors, scale in pool.run(2, overflow, scaled, when):
        assert finite and same
        moved = [not torch.equal(a, b) for a, b in pairwise(parameters)]
        assert moved == [step != when for step in range(5)], "that step was skipped, and no other"
        if scaled:
            assert scale == 512.0 and not errors
        else:
            assert len(errors) == 1 and ("0.weight" in errors[0] or "another rank" in errors[0])


def scaled_and_not():
    out = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        laconic.compress(model, optimizer, "topk(density=0.1)", scaler=scaler)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        out.append(flat(model))
    return out


def test_residuals_do_not_mix_scales(pool):
    """The scale doubles every two steps, powers of two: the same bits as without a scaler."""
    for plain, scaled in pool.run(2, scaled_and_not):
        assert torch.equal(plain, scaled)


def warned_of_a_scaler(spec, tells, fused, touch):
    """What a script is told that steps by a GradScaler, or whose `touch` changes its gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=touch is None)
    laconic.compress(model, optimizer, spec, scaler=scaler if tells else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if touch is not None:
                for each in model.parameters():
                    each.grad.mul_(touch)
            scaler.step(optimizer)
            scaler.update()
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("spec", "fused"),
    [
        ("topk(density=0.1)", False),
        ("topk(density=0.1)", True),
        ("sign()", False),
        ("dgc(density=0.1)", False),
    ],
)
def test_a_scaler_that_a_memory_does_not_know_of_is_told(pool, spec, fused):
    for said in pool.run(2, warned_of_a_scaler, spec, False, fused, None):
        (text,) = said
        assert "between backward() and step()" in text and "scaler=scaler" in text
    assert pool.run(2, warned_of_a_scaler, spec, True, fused, None) == [[], []]


def test_clipping_and_methods_without_a_memory_are_told_nothing(pool):
    assert pool.run(2, warned_of_a_scaler, "topk(density=0.1)", False, False, 0.3) == [[], []]
    assert pool.run(2, warned_of_a_scaler, "fp16()", False, False, None) == [[], []]


def sparse_overflow():
    torch.manual_seed(0)
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    laconic.compress(model, optimizer, "topk(density=0.1)")
    loss = loss_of(model, 0) * (math.inf if dist.get_rank() == 1 else 1.0)
    loss.backward()
    try:
        optimizer.step()
    except NonFiniteError:
        return agree(model)
    return False


def test_inf_in_a_sparse_gradient_is_refused_too(pool):
    assert pool.run(2, sparse_overflow) == [True, True]
