"""1-bit Adam, 0/1 Adam and COMP-AMS behind DDP, in real processes, with all that scripts do to gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, compressed, scaled_step, stop_and_go

ONE = "onebit_adam(warmup_steps=4)"
ZERO = "zero_one_adam(freeze_steps=4, kappa=1, double_every=3, longest=2)"
AMS = "comp_ams(topk(density=0.05))"
SPARSE = "sparse_adam(density=0.2, warmup_steps=4)"
SPECS = (ONE, ZERO, AMS, SPARSE)


def built(spec, dtype=torch.float32, scaler=None, **ddp):
    model = DistributedDataParallel(net().to(dtype), **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=spec == AMS)
    return model, optimizer, laconic.compress(model, optimizer, spec, scaler=scaler)


def adam_train(spec, how, steps):
    """The losses and figures of some steps of a script that does one more thing, on one batch."""
    model, optimizer, handle = built(spec, torch.bfloat16 if how == "bf16" else torch.float32, **MANY)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if how == "accumulation":
            with model.no_sync():
                (loss_of(model, 1) / 2).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            loss = loss_of(model if how != "bf16" else Halved(model), 0)
        loss.backward()
        if how == "clipping":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert steps != 24 or agree(model), "0/1 Adam then ends at a round"
    return losses, handle.stats()


class Halved:
    """A bfloat16 model that takes float32 inputs."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x.to(torch.bfloat16)).float()


HOWS = ("plain", "clipping", "accumulation", "bf16", "autocast")


def trains(spec, how):
    losses, stats = adam_train(spec, how, 24)
    assert losses[-1] < losses[0] and stats.steps == 24


@on_ranks(2, [(spec, how) for i, spec in enumerate(SPECS) for j, how in enumerate(HOWS) if (i + j) % 2 == 0])
def test_scripts_do_to_gradients_what_they_do(spec, how):
    trains(spec, how)


@pytest.mark.nightly
@on_ranks(2, product(SPECS, HOWS), timeout_s=600)
def test_scripts_do_to_gradients_what_they_do_under_each_method(spec, how):
    trains(spec, how)


def test_a_round_costs_a_bit_up_and_a_bit_down(pool):
    def payload(steps):
        return [stats.payload_sent for _, stats in pool.run(4, adam_train, ONE, "plain", steps)]

    model = net()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    others = 4 * (sum(p.numel() for p in model.parameters()) - weights)
    for many, few in zip(payload(12), payload(6), strict=True):
        a_step = (many - few) / 6 - others
        assert weights / 8 < a_step < 2.3 * weights / 8


@on_ranks(2, product((2, 7), SPECS))
def test_a_grad_scaler_skips_the_same_step_on_every_rank(when, spec):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    model, optimizer, handle = built(spec, scaler=scaler, **MANY)
    for step in range(10):
        optimizer.zero_grad()
        bad = step == when and torch.distributed.get_rank() == 1
        before = flat(model)
        scaled_step(scaler, optimizer, loss_of(model, step) * (torch.inf if bad else 1.0))
        assert torch.equal(before, flat(model)) == (step == when)
    handle.remove()  # ends with a round
    assert agree(model)


@on_ranks(2, SPECS)
def test_a_resumed_run_ends_with_the_same_bits(spec):
    (whole, *_), (model, *_) = stop_and_go(lambda again: built(spec), 12, 7)
    assert torch.equal(flat(whole), flat(model))


@on_ranks(2, ((ONE, "Adam or AdamW, got SGD"), (AMS, "amsgrad=True, got SGD")))
def test_the_need_is_told_on_every_rank(spec, words):
    with pytest.raises(AttachError, match=words):
        compressed(spec)
