"""1-bit Adam, 0/1 Adam and COMP-AMS behind DDP, in real processes, with all that scripts do to gradients."""

from __future__ import annotations

import io

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import agree, flat, loss_of, net

MANY = {"bucket_cap_mb": 0.01}
ONE = "onebit_adam(warmup_steps=4)"
ZERO = "zero_one_adam(freeze_steps=4, kappa=1, double_every=3, longest=2)"
AMS = "comp_ams(topk(density=0.05))"


def built(spec, dtype=torch.float32, **ddp):
    model = DistributedDataParallel(net().to(dtype), **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=spec == AMS)
    return model, optimizer, laconic.compress(model, optimizer, spec)


def adam_train(spec, how, steps):
    """A few steps of a script that does one more thing; whether replicas agree, the losses, the figures."""
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
    return agree(model), losses, handle.stats()


class Halved:
    """A bfloat16 model that takes float32 inputs."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x.to(torch.bfloat16)).float()


@pytest.mark.parametrize("how", ["plain", "clipping", "accumulation", "bf16", "autocast"])
@pytest.mark.parametrize("spec", [ONE, ZERO, AMS])
def test_scripts_do_to_gradients_what_they_do(pool, spec, how):
    """24 steps on one batch; 0/1 Adam then ends at a round."""
    for same, losses, stats in pool.run(2, adam_train, spec, how, 24):
        assert same
        assert losses[-1] < losses[0]
        assert stats.steps == 24


def test_a_round_costs_a_bit_up_and_a_bit_down(pool):
    def payload(steps):
        return [stats.payload_sent for _, _, stats in pool.run(4, adam_train, ONE, "plain", steps)]

    model = net()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    others = 4 * (sum(p.numel() for p in model.parameters()) - weights)
    for many, few in zip(payload(12), payload(6), strict=True):
        a_step = (many - few) / 6 - others
        assert weights / 8 < a_step < 2.3 * weights / 8


def inf_on_one_rank(spec, when):
    model, optimizer, handle = built(spec, **MANY)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    handle.remove()
    handle = laconic.compress(model, optimizer, spec, scaler=scaler)
    stepped = []
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and torch.distributed.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, flat(model)))
    handle.remove()  # ends with a round
    return stepped, agree(model)


@pytest.mark.parametrize("when", [2, 7])
@pytest.mark.parametrize("spec", [ONE, ZERO, AMS])
def test_a_grad_scaler_skips_the_same_step_on_every_rank(pool, spec, when):
    for stepped, same in pool.run(2, inf_on_one_rank, spec, when):
        assert stepped == [step != when for step in range(10)]
        assert same


def stop_and_go(spec):
    model, optimizer, handle = built(spec)
    saved = io.BytesIO()
    for step in range(12):
        if step == 7:
            torch.save([model.module.state_dict(), optimizer.state_dict(), handle.state_dict()], saved)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    saved.seek(0)
    weights, moments, memory = torch.load(saved, weights_only=True)
    again, other, handle = built(spec)
    again.module.load_state_dict(weights)
    other.load_state_dict(moments)
    handle.load_state_dict(memory)
    for step in range(7, 12):
        other.zero_grad()
        loss_of(again, step).backward()
        other.step()
    return flat(model), flat(again)


@pytest.mark.parametrize("spec", [ONE, ZERO, AMS])
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


def with_sgd(spec):
    model = DistributedDataParallel(net())
    with pytest.raises(AttachError) as caught:
        laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    return str(caught.value)


@pytest.mark.parametrize(("spec", "words"), [(ONE, "Adam or AdamW, got SGD"), (AMS, "amsgrad=True, got SGD")])
def test_the_need_is_told_on_every_rank(pool, spec, words):
    for said in pool.run(2, with_sgd, spec):
        assert words in said
