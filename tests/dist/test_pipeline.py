"""Laws of compressed pipelines, in real processes over gloo."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import laconic
from tests.dist.pipelines import (
    SAMPLES,
    SCHEDULES,
    TESTED,
    Pipeline,
    agree_on_sides,
    begun,
    metered,
    order,
    stepped,
    trained,
)  # fmt: skip
from tests.dist.pool import on_ranks
from tests.dist.runs import reloaded, same

pytestmark = TESTED

KINDS = (*SCHEDULES, "ZBVZeroBubble")
TWO_BITS = {"forward": "change(minmax(bits=2))", "samples": SAMPLES}


@on_ranks((2, 4), KINDS, timeout_s=300)
def test_dense_is_bit_equal_to_the_plain_schedule_and_both_sides_are_equal_bit_for_bit(kind):
    """Where changes are sent, in two bits."""
    plain, plain_losses, _ = trained(kind, 3)
    ours, losses, handle = trained(kind, 3, forward="dense()", backward="dense()")
    handle.remove()
    stats = handle.stats()
    assert torch.equal(plain, ours) and plain_losses == losses and stats.steps == 3
    assert stats.forward_sent + stats.backward_sent > stats.dense_forward + stats.dense_backward
    handle = trained(kind, 4, **TWO_BITS)[2]
    assert handle.stats().changes == handle.stats().first_visits > 0
    agree_on_sides(handle)


SAID = (
    ("ac_sgd(forward=2)", "change(minmax(bits=2, block=128))", "minmax(bits=8, block=128)"),
    ("change(dense())", "change(dense())", "minmax(bits=8)"),
    ("cast('fp16')", "cast(dtype='fp16')", "cast(dtype='fp16')"),
)


@on_ranks(2, SAID)
def test_one_spec_says_both_directions(spec, forward, backward):
    plan = trained("GPipe", 1, spec=spec, samples=SAMPLES)[2].plan
    assert (repr(plan.forward), repr(plan.backward)) == (forward, backward)


CODINGS = [
    {"forward": "change(minmax(bits=1, block=4, rounding='stochastic'), first='fp32')", "seed": 3},
    {"forward": "change(minmax(bits=4, block=16), first='fp16')", "keep": "cast('fp16')"},
    {"forward": "change(minmax(bits=3), first='bf16')", "keep": "minmax(bits=8)"},
    {"forward": "change(sparse(topk(density=0.5)))", "backward": "topk(density=0.5)"},
    {"forward": "change(qsgd(levels=15))", "backward": "qsgd(127)", "keep": "minmax(8, 16, 'stochastic')"},
]


@on_ranks(2, CODINGS)
def test_any_codec_and_any_keeping_leaves_both_sides_equal(options):
    agree_on_sides(trained("1F1B", 4, samples=SAMPLES, **options)[2])


@on_ranks(2, timeout_s=300.0)
def test_a_hundred_steps_leave_both_sides_equal():
    """Two micro-batches of one sample, shuffled anew in each epoch of four. A thousand steps of
    every schedule are in the soak tests, and a thousand visits in the unit tests."""
    pipeline = Pipeline("1F1B", micros=2)
    handle = laconic.pipeline.compress(pipeline.schedule, **TWO_BITS)
    for step in range(100):
        handle.samples = ids = order(step // 4)[:8][step % 4 * 2 :][:2]
        pipeline.train(ids)
    agree_on_sides(handle)
    assert handle.stats().changes > 150


@pytest.mark.soak
@on_ranks((2, 4), KINDS, timeout_s=3600.0)
def test_a_thousand_steps_leave_both_sides_equal_in_all_schedules(kind):
    agree_on_sides(trained(kind, 1000, **TWO_BITS)[2])


def last_losses(options):
    return trained("GPipe", 28, **options)[1][-6:]


def test_change_coding_trains_as_torchs_own_pipeline_where_direct_quantisation_does_not(pool):
    ways = [{}, {"forward": "change(minmax(bits=2))", "samples": SAMPLES}, {"forward": "minmax(bits=2)"}]
    plain, change, direct = (sum(last) for _, (_, last) in pool.each(2, last_losses, ways))
    assert abs(change / plain - 1) < 0.01
    assert direct / plain - 1 > 3 * abs(change / plain - 1)


def restarts(kind, options, buffers):
    """Whether five steps have the bits of three, and two of objects that were restored."""
    whole, _, handle = trained(kind, 5, **options)
    first, before = begun(kind, **options)
    for step in range(3):
        assert stepped(first, before, order(step)) is None
    second, after = begun(kind, **options)
    modules = [module.state_dict() for module in first.modules]
    saved = reloaded([*modules, first.optimizer.state_dict(), before.state_dict(buffers=buffers)])
    for part, state in zip((*second.modules, second.optimizer, after), saved, strict=True):
        part.load_state_dict(state)
    for step in range(3, 5):
        assert stepped(second, after, order(step)) is None
    agree_on_sides(after)
    return torch.equal(whole, second.weights), handle.digests() == after.digests()


@on_ranks(2, SCHEDULES)
def test_a_restart_from_a_checkpoint_goes_on_as_if_never_stopped(kind):
    options = {"forward": "change(minmax(bits=2, block=16, rounding='stochastic'))", "samples": SAMPLES}
    assert restarts(kind, options, True) == (True, True)


@on_ranks(2)
def test_a_restart_without_buffers_fills_them_anew():
    assert not restarts("GPipe", TWO_BITS, False)[0]


FORWARDS = ("change(minmax(bits=4))", "change(sparse(topk(density=0.2)))", "minmax(bits=4)")


def counted(kind, exact, forward):
    with metered() as meter:
        handle = trained(kind, 3, exact=exact, forward=forward, samples=SAMPLES)[2]
    handle.remove()
    return meter, handle.stats()


def test_bytes_are_those_that_a_metered_transport_saw(pool):
    cases = list(product(SCHEDULES, (False, True), FORWARDS))
    for (kind, exact, forward), found in pool.each(2, counted, cases, timeout_s=300):
        case = kind, exact, forward
        for meter, stats in found:
            assert meter["sent"] == stats.forward_sent + stats.backward_sent > 0, case
            if exact:
                assert meter["received"] == stats.forward_received + stats.backward_received, case
            else:  # posted before torch's schedule fires anything
                assert meter["received"] == 0 < stats.forward_received + stats.backward_received, case
        (_, zero), (_, one) = found
        assert (zero.forward_sent, one.forward_sent) == (one.forward_received, zero.forward_received), case
        assert (zero.backward_sent, one.backward_sent) == (one.backward_received, zero.backward_received), (
            case
        )


@on_ranks(2)
def test_accumulation_over_several_steps_leaves_both_sides_equal():
    pipeline, handle = begun("1F1B", **TWO_BITS)
    for step in range(5):
        for part in order(step).split(4):
            handle.samples = part
            pipeline.train(part, optimise=part[-1] == order(step)[-1])
    agree_on_sides(handle)


@on_ranks(2)
def test_evaluation_needs_no_ids_and_leaves_no_trace():
    pipeline, handle = begun(**TWO_BITS)
    assert stepped(pipeline, handle, order(0)) is None
    before = handle.digests()
    pipeline.evaluate(order(1))
    assert same(before, handle.digests())
    assert stepped(pipeline, handle, order(1)) is None
    assert handle.stats().steps == 2
    agree_on_sides(handle)


@on_ranks(2, SCHEDULES)
def test_remove_gives_torch_its_stages_back_and_stages_can_be_given_alone(kind):
    pipeline = Pipeline(kind)
    classes = [type(stage) for stage in pipeline.stages]
    handle = laconic.pipeline.compress(pipeline.schedule, forward="dense()", backward="dense()")
    pipeline.train(order(0))
    handle.remove()
    handle.remove()
    back = [type(stage) for stage in pipeline.stages] == classes
    pipeline.train(order(1))
    plain = torch.equal(pipeline.weights, trained(kind, 2)[0])
    given = Pipeline(kind)
    by_stages = laconic.pipeline.compress(given.stages, **TWO_BITS)
    for step in range(3):
        given.stages[0].samples = order(step)
        given.train(order(step))
    same = torch.equal(given.weights, trained(kind, 3, **TWO_BITS)[0])
    assert back and handle.stats().steps == 1 and plain and same and by_stages.stats().steps == 3


def on_disk(folder):
    """Buffers in files, read ahead, are those in RAM."""
    pipeline, handle = begun("1F1B", folder=folder, **TWO_BITS)
    for step in range(5):
        handle.upcoming = order(step + 1)
        assert stepped(pipeline, handle, order(step)) is None
    agree_on_sides(handle)
    digests = handle.digests()
    handle.remove()
    weights, _, ram = trained("1F1B", 5, **TWO_BITS)
    assert digests == ram.digests() and torch.equal(pipeline.weights, weights)


def test_buffers_in_files_are_those_in_ram(pool, tmp_path):
    pool.run(2, on_disk, str(tmp_path))
    assert not list(tmp_path.iterdir())
