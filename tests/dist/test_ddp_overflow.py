"""Gradients under DDP that are not finite on one rank, and scaled ones."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import NonFiniteError
from tests.dist.composition import Words
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, compressed, overflow, scaled_step, spike, train


@on_ranks(2, (0, 1, 2))
def test_inf_on_one_rank_skips_the_step_on_all(when):
    """Also in the first step, and in the next, when DDP has just regrouped its buckets."""
    model, optimizer, handle = compressed("dgc(density=0.05)", **MANY)
    for step in range(5):
        optimizer.zero_grad()
        loss, before = loss_of(model, step), flat(model)
        if step == when and dist.get_rank() == 1:
            loss = loss + spike(next(p for p in model.parameters() if p.ndim > 1))
        loss.backward()
        skipped = pytest.raises(NonFiniteError, match=r"0\.weight|another rank")
        with skipped if step == when else nullcontext():
            optimizer.step()
        assert torch.equal(before, flat(model)) == (step == when), "that step was skipped, and no other"
    assert agree(model)
    assert all(bool(value.isfinite().all()) for value in handle.state_dict()["tensors"].values())


@on_ranks(2, (0, 1, 2))
def test_inf_on_one_rank_makes_scalers_skip_the_step_on_all(when):
    each = overflow("dgc(density=0.05)", when, 5)
    assert each.moved == [step != when for step in range(5)]
    assert each.agreed and each.scale == 512.0


@on_ranks(2)
def test_residuals_do_not_mix_scales():
    """The scale doubles every two steps, powers of two: the same bits as without a scaler."""
    plain = train("topk(density=0.1)")[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)
    model, optimizer, _ = compressed("topk(density=0.1)", scaler=scaler)
    for step in range(6):
        optimizer.zero_grad()
        scaled_step(scaler, optimizer, loss_of(model, step))
    assert torch.equal(plain, flat(model))


def warned_of_a_scaler(spec, tells, fused, touch):
    """What a script is told that steps by a GradScaler, or whose `touch` changes its gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    kind = torch.optim.Adam if "adam" in spec else partial(torch.optim.SGD, momentum=0.9)
    optimizer = kind(model.parameters(), lr=0.05, fused=fused)
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


UNTOLD = ("topk(density=0.1)", "sign()", "dgc(density=0.1)", "cgx()", "onebit_adam(warmup_steps=2)")


@on_ranks(2, [*((spec, False) for spec in UNTOLD), ("topk(0.1)", True)])
def test_a_scaler_that_a_method_does_not_know_of_is_told(spec, fused):
    (text,) = warned_of_a_scaler(spec, False, fused, None)
    assert "between backward() and step()" in text and "scaler=scaler" in text
    assert warned_of_a_scaler(spec, True, fused, None) == []


@on_ranks(2)
def test_clipping_and_sums_are_told_nothing():
    assert warned_of_a_scaler("topk(density=0.1)", False, False, 0.3) == []
    assert warned_of_a_scaler("fp16()", False, False, None) == []


@on_ranks(2)
def test_inf_in_a_sparse_gradient_is_refused_too():
    model, optimizer, _ = compressed("topk(density=0.1)", Words(), sgd={"lr": 0.05})
    (loss_of(model, 0) * (torch.inf if dist.get_rank() == 1 else 1.0)).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert agree(model)
