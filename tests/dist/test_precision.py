"""Mixed precision: one rank's overflow makes all skip, and a resumed training does the same bits."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.errors import AttachError, NonFiniteError
from laconic.optim import master_weights
from laconic.report.loss_scale import loss_scale
from laconic.report.series import MethodSeries, Run, seed_series
from laconic.report.summary import summarise
from laconic.tasks import checkpoint, precision, training
from laconic.tasks.group_model import MODEL
from laconic.tasks.training import train_rank
from tests.dist.ddp_world import spike
from tests.dist.nets import SGD, agree, batch, loss_of, net
from tests.dist.test_training import losses, plan  # noqa: F401  # a fixture

STRATEGIES = ("local_sgd(every=2)", "diloco(every=3)", "sgp()", "osgp()", "dpsgd()", "easgd()")
METHODS = ("dense()", "fp16()", "dgc(density=0.05)", "cgx()", "powersgd()", "topk(density=0.1)")


def half_loss(model, step):
    """The loss of this rank's batch by a model whose parameters may be float16."""
    x, y = batch(dist.get_rank(), step)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def overflow(spec, when, given=True, dtype=torch.float32):
    """Inf on the last rank at one step: where this rank moved, its scale, whether replicas are equal."""
    model = net().to(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    plain = torch.optim.SGD(model.parameters(), **SGD)
    if dtype != torch.float32:
        master_weights(plain)
    weight = model[0].weight
    wrapped, optimizer = laconic.distribute(model, plain, spec, scaler=scaler if given else None)
    updates, scales, count = [], [], [0]
    plain.register_step_post_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    for step in range(6):
        optimizer.zero_grad()
        loss = half_loss(wrapped, step)
        if step == when and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss + spike(weight)
        scaler.scale(loss).backward()
        before = count[0]
        scaler.step(optimizer)
        scaler.update()
        updates.append(count[0] > before)
        scales.append(scaler.get_scale())
    optimizer.finish()
    together = agree(model)
    optimizer.remove()
    return updates, scales, together, "_unscale_grads_" in vars(scaler)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spec", STRATEGIES + METHODS)
def test_an_overflow_on_one_rank_makes_all_skip(pool, spec, size):
    """The scale, too, stays equal on all: halved at step 2, and doubled after four steps without."""
    for updates, scales, together, patched in pool.run(size, overflow, spec, 2):
        assert updates == [True, True, False, True, True, True]
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
        assert together and not patched


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", ["local_sgd(every=2)", "sgp()", "dense()", "dgc(density=0.05)"])
def test_so_it_is_with_master_weights(pool, spec, dtype):
    for updates, scales, together, _ in pool.run(2, overflow, spec, 2, True, dtype):
        assert updates == [True, True, False, True, True, True]
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
        assert together


def test_without_the_scaler_a_strategys_ranks_skip_by_their_own(pool):
    first, last = pool.run(2, overflow, "local_sgd(every=2)", 2, False)
    assert first[0] == [True] * 6 and first[1][-1] == 2048.0
    assert last[0] == [True, True, False, True, True, True] and last[1][-1] == 512.0


def counted(spec):
    out = []
    for given in (False, True):
        scaler = torch.amp.GradScaler("cpu") if given else None
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = laconic.distribute(model, plain, spec, scaler=scaler)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        out.append(optimizer.stats().payload_sent)
        optimizer.remove()
    return out


def test_sharing_costs_four_bytes_a_step_and_they_are_counted(pool):
    for alone, shared in pool.run(2, counted, "local_sgd(every=5)"):
        assert shared == alone + 5 * 4


def refusals():
    said, models = [], []
    scaler = torch.amp.GradScaler("cpu")

    def attempt(spec, **options):
        model = net()
        models.append(model)  # one that is dropped gives its scaler back
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            return laconic.distribute(model, optimizer, spec, scaler=scaler, **options)[1]
        except AttachError as error:
            said.append(str(error))
            return None

    attempt("adpsgd()")
    attempt("local_sgd()", patience_s=5.0)
    first = attempt("local_sgd()")
    attempt("diloco()")
    first.remove()
    again = attempt("diloco()")
    again.remove()
    attempt("sgp()")
    models.clear()
    gc.collect()
    attempt("sgp()")
    return said


def test_a_scaler_that_cannot_be_shared_is_refused(pool):
    for said in pool.run(2, refusals):
        pace, patience, twice = said
        assert "own pace" in pace and "bfloat16" in pace
        assert "patience_s" in patience
        assert "given twice" in twice


def trained(plan):  # noqa: F811
    events = []
    train_rank(plan, events.append)
    return events


def trained_with_overflow(plan, when):  # noqa: F811
    """Rank 0's loss of one step is multiplied by what float16 cannot hold."""
    calls, real = [0], training.cross_entropy

    def overflowing(logits, y):
        calls[0] += 1
        loss = real(logits, y)
        bad = calls[0] == when and dist.get_rank() == 0
        return loss * math.inf if bad else loss

    training.cross_entropy = overflowing
    try:
        return trained(plan)
    finally:
        training.cross_entropy = real


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("spec", ["dense()", "dgc(density=0.1)", "local_sgd(every=2)"])
def test_a_training_in_16_bits_is_close_to_float32_and_says_its_scale(pool, plan, spec, name):  # noqa: F811
    """Six steps: losses within 2 % of float32's; float16 tells a scale, bfloat16 has none."""
    whole = pool.run(2, trained, replace(plan, spec=spec))
    half = pool.run(2, trained, replace(plan, spec=spec, precision=name))
    for events, found in zip(whole, half, strict=True):
        assert losses(found) != losses(events)
        assert losses(found) == pytest.approx(losses(events), rel=0.02)
        told = [event.get("loss_scale") for event in found if event["kind"] == "step"]
        assert told == [65536.0 if name == "fp16" else None] * 6


@pytest.mark.parametrize("spec", ["dgc(density=0.1)", "local_sgd(every=3)"])
def test_an_overflow_in_training_is_skipped_by_all_and_reported(pool, plan, spec):  # noqa: F811
    found = pool.run(2, trained_with_overflow, replace(plan, spec=spec, precision="fp16"), 3)
    for events in found:
        steps = [event for event in events if event["kind"] == "step"]
        assert [event["skipped"] for event in steps] == [False, False, True, False, False, False]
        assert [event["loss_scale"] for event in steps] == [65536.0] * 3 + [32768.0] * 3
    events = [event | {"rank": rank} for rank, its in enumerate(found) for event in its]
    series = MethodSeries(spec, (seed_series(0, events),))
    row = summarise(Run({}, (series,)))[0]
    assert (row.skipped, row.loss_scale) == (1.0, 32768.0)
    section = loss_scale(Run({}, (series,)))
    assert "1 of 6 steps skipped, scale 32768" in section and 'id="scale_by_step"' in section


@pytest.mark.parametrize("spec", ["dgc(density=0.1)", "local_sgd(every=3)"])
def test_a_resumed_training_has_the_scale_and_does_the_same_bits(pool, plan, spec):  # noqa: F811
    """Resumed after a step that was skipped: without the scaler's state the scale would be 65536 again."""
    plan = replace(plan, spec=spec, precision="fp16", checkpoint_every=1)
    whole = pool.run(2, trained_with_overflow, plan, 3)
    model = torch.load(plan.folder / MODEL)
    saved = checkpoint.load(plan.folder / "step-000005", rank=0, size=2)["precision"]
    assert saved["scale"] == 32768.0 and saved["_growth_tracker"] == 2
    rest = pool.run(2, trained, replace(plan, resume_from=plan.folder / "step-000005"))
    for events, later in zip(whole, rest, strict=True):
        assert losses(events)[5:] == losses(later)
        assert losses(later, name="loss_scale") == [32768.0]
    found = torch.load(plan.folder / MODEL)
    assert all(torch.equal(model[key], found[key]) for key in model)


def test_a_scale_without_a_floor_is_divergence():
    half = precision.Precision("fp16")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(NonFiniteError, match="no scale makes gradients finite"):
        for _ in range(30):
            optimizer.zero_grad()
            half.backward((weight * math.nan).sum())
            half.step(optimizer)
    assert weight.item() == 1.0
    assert half.scale < precision.LEAST_SCALE
