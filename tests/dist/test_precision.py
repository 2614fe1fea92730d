"""Mixed precision: one rank's overflow makes all skip, and a resumed training does the same bits."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.errors import AttachError, NonFiniteError
from laconic.optim import master_weights
from laconic.tools.report.loss_scale import loss_scale
from laconic.tools.report.series import MethodSeries, Run, seed_series
from laconic.tools.report.summary import summarise
from laconic.tools.tasks import checkpoint, precision, training
from laconic.tools.tasks.group_model import MODEL
from tests.dist.nets import SGD, agree, batch, loss_of, net
from tests.dist.plans import told
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, scaled_step, spike
from tests.dist.test_training import trained

STRATEGIES = ("local_sgd(every=2)", "diloco(every=3)", "sgp()", "osgp()", "dpsgd()", "easgd()")
METHODS = ("dense()", "fp16()", "dgc(density=0.05)", "cgx()", "powersgd()", "topk(density=0.1)")


def half_loss(model, step):
    """The loss of this rank's batch by a model whose parameters may be float16."""
    x, y = batch(dist.get_rank(), step)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def overflow(spec, given=True, dtype=torch.float32):
    """Inf on the last rank at step 2: where this rank moved, and its scale; with it replicas are equal."""
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
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss + spike(weight)
        before = count[0]
        scaled_step(scaler, optimizer, loss)
        updates.append(count[0] > before)
        scales.append(scaler.get_scale())
    optimizer.finish()
    assert agree(model) or not given
    optimizer.remove()
    assert "_unscale_grads_" not in vars(scaler)
    return updates, scales


def skips_together(spec, dtype=torch.float32):
    """The scale, too, stays equal on all: halved at step 2, and doubled after four steps without."""
    updates, scales = overflow(spec, dtype=dtype)
    assert updates == [True, True, False, True, True, True]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]


HALF = product(
    ("local_sgd(every=2)", "sgp()", "dense()", "dgc(density=0.05)"), (torch.float16, torch.bfloat16)
)


@on_ranks(2, [*STRATEGIES, *METHODS, *HALF])
def test_an_overflow_on_one_rank_makes_all_skip_with_master_weights_too(spec, dtype=torch.float32):
    skips_together(spec, dtype)


@on_ranks(4, (*STRATEGIES[::2], *METHODS[1::2]))
def test_an_overflow_on_one_of_four_ranks_makes_all_skip(spec):
    skips_together(spec)


def test_without_the_scaler_a_strategys_ranks_skip_by_their_own(pool):
    first, last = pool.run(2, overflow, "local_sgd(every=2)", False)
    assert first[0] == [True] * 6 and first[1][-1] == 2048.0
    assert last[0] == [True, True, False, True, True, True] and last[1][-1] == 512.0


@on_ranks(2)
def test_sharing_costs_four_bytes_a_step_and_they_are_counted():
    spec = "local_sgd(every=5)"
    out = []
    for given in (False, True):
        scaler = torch.amp.GradScaler("cpu") if given else None
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = laconic.distribute(model, plain, spec, scaler=scaler)
        if not given:
            advance(model, optimizer, 5)
        for step in range(5 * given):
            optimizer.zero_grad()
            scaled_step(scaler, optimizer, loss_of(model, step))
        out.append(optimizer.stats().payload_sent)
        optimizer.remove()
    alone, shared = out
    assert shared == alone + 5 * 4


@on_ranks(2)
def test_a_scaler_that_cannot_be_shared_is_refused():
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
    pace, patience, twice = said
    assert "own pace" in pace and "bfloat16" in pace
    assert "patience_s" in patience
    assert "already shared" in twice


def trained_with_overflow(plan, when):
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


def test_a_training_in_16_bits_is_close_to_float32_and_says_its_scale(pool, plan):
    """Six steps: losses within 2 % of float32's; float16 tells a scale, bfloat16 has none."""
    cases = ("dense()", "fp16"), ("dgc(density=0.1)", "bf16"), ("local_sgd(every=2)", "fp16")
    plans = [replace(plan, spec=spec, precision=name) for spec, name in cases for name in (None, name)]
    ends = [found for _, found in pool.each(2, trained, plans, timeout_s=240)]
    for (spec, name), whole, half in zip(cases, ends[::2], ends[1::2], strict=True):
        for events, found in zip(whole, half, strict=True):
            assert told(found) != told(events), spec
            assert told(found) == pytest.approx(told(events), rel=0.02), spec
            scales = [event.get("loss_scale") for event in found if event["kind"] == "step"]
            assert scales == [65536.0 if name == "fp16" else None] * 6, spec


@pytest.mark.parametrize("spec", ["dgc(density=0.1)", "local_sgd(every=3)"])
def test_an_overflow_in_training_is_skipped_by_all_and_reported(pool, plan, spec):
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
def test_a_resumed_training_has_the_scale_and_does_the_same_bits(pool, plan, spec):
    """Resumed after a step that was skipped: without the scaler's state the scale would be 65536 again."""
    plan = replace(plan, spec=spec, precision="fp16", checkpoint_every=1)
    whole = pool.run(2, trained_with_overflow, plan, 3)
    model = torch.load(plan.folder / MODEL)
    saved = checkpoint.load(plan.folder / "step-000005", rank=0, size=2)["precision"]
    assert saved["scale"] == 32768.0 and saved["_growth_tracker"] == 2
    rest = pool.run(2, trained, replace(plan, resume_from=plan.folder / "step-000005"))
    for events, later in zip(whole, rest, strict=True):
        assert told(events)[5:] == told(later)
        assert told(later, name="loss_scale") == [32768.0]
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
