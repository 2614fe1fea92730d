"""Laws of compressed pipelines, in real processes over gloo."""

from __future__ import annotations

import io

import pytest
import torch

import laconic
from tests.dist.pipelines import SAMPLES, SCHEDULES, TESTED, Pipeline, check_sides, metered, order, trained

pytestmark = TESTED

CASES = [(kind, size) for kind in (*SCHEDULES, "ZBVZeroBubble") for size in (2, 4)]
TWO_BITS = {"forward": "change(minmax(bits=2))", "samples": SAMPLES}


def laws(kind):
    """Of torch's own pipeline and one that sends everything as it is; then of one that sends changes."""
    plain, plain_losses, _ = trained(kind, 3)
    ours, losses, handle = trained(kind, 3, forward="dense()", backward="dense()")
    handle.remove()
    changes = trained(kind, 4, **TWO_BITS)[2]
    same = torch.equal(plain, ours) and plain_losses == losses
    return same, handle.stats(), changes.digests(), changes.stats()


@pytest.mark.parametrize("kind, size", CASES)
def test_dense_is_bit_equal_to_the_plain_schedule_and_both_sides_are_equal_bit_for_bit(pool, kind, size):
    found = pool.run(size, laws, kind)
    for same, stats, _, changes in found:
        assert same
        assert stats.steps == 3
        assert stats.forward_sent + stats.backward_sent > stats.dense_forward + stats.dense_backward
        assert changes.changes == changes.first_visits > 0
    check_sides([digests for _, _, digests, _ in found])


def by_specs(specs):
    plans = [trained("GPipe", 1, spec=spec, samples=SAMPLES)[2].plan for spec in specs]
    return [(repr(plan.forward), repr(plan.backward)) for plan in plans]


def test_one_spec_says_both_directions(pool):
    said = {
        "ac_sgd(forward=2)": ("change(minmax(bits=2, block=128))", "minmax(bits=8, block=128)"),
        "change(dense())": ("change(dense())", "minmax(bits=8)"),
        "cast('fp16')": ("cast(dtype='fp16')", "cast(dtype='fp16')"),
    }
    assert pool.run(2, by_specs, list(said)) == [list(said.values())] * 2


def sides(kind, steps, options):
    handle = trained(kind, steps, **options)[2]
    return handle.digests(), handle.stats()


CODINGS = [
    {"forward": "change(minmax(bits=1, block=4, rounding='stochastic'), first='fp32')", "seed": 3},
    {"forward": "change(minmax(bits=4, block=16), first='fp16')", "keep": "cast('fp16')"},
    {"forward": "change(minmax(bits=3), first='bf16')", "keep": "minmax(bits=8)"},
    {"forward": "change(sparse(topk(density=0.5)))", "backward": "topk(density=0.5)"},
    {
        "forward": "change(qsgd(levels=15))",
        "backward": "qsgd(levels=127)",
        "keep": "minmax(8, 16, 'stochastic')",
    },
]


def sides_of_each(codings):
    return [sides("1F1B", 4, {"samples": SAMPLES, **options})[0] for options in codings]


def test_any_codec_and_any_keeping_leaves_both_sides_equal(pool):
    for digests in zip(*pool.run(2, sides_of_each, CODINGS), strict=True):
        check_sides(digests)


def small(steps):
    """Digests after many steps of two micro-batches of one sample; shuffled anew in each epoch of four."""
    pipeline = Pipeline("1F1B", micros=2)
    handle = laconic.pipeline.compress(pipeline.schedule, **TWO_BITS)
    for step in range(steps):
        handle.samples = ids = order(step // 4)[:8][step % 4 * 2 :][:2]
        pipeline.train(ids)
    return handle.digests(), handle.stats().changes


def test_a_hundred_steps_leave_both_sides_equal(pool):
    """A thousand steps of every schedule are in the soak tests, and a thousand visits in the unit tests."""
    found = pool.run(2, small, 100, timeout_s=300.0)
    check_sides([digests for digests, _ in found])
    assert all(changes > 150 for _, changes in found)


@pytest.mark.soak
@pytest.mark.parametrize("kind, size", CASES)
def test_a_thousand_steps_leave_both_sides_equal_in_all_schedules(pool, kind, size):
    found = pool.run(size, sides, kind, 1000, TWO_BITS, timeout_s=900.0)
    check_sides([digests for digests, _ in found])


def learns(each):
    return [trained("GPipe", 28, **options)[1][-6:] for options in each]


def test_change_coding_trains_as_torchs_own_pipeline_where_direct_quantisation_does_not(pool):
    ways = [{}, {"forward": "change(minmax(bits=2))", "samples": SAMPLES}, {"forward": "minmax(bits=2)"}]
    plain, change, direct = map(sum, pool.run(2, learns, ways)[1])
    assert abs(change / plain - 1) < 0.01
    assert direct / plain - 1 > 3 * abs(change / plain - 1)


def stop_and_go(kind, options, buffers):
    """Weights after five steps, and after three then two of objects that were restored."""
    whole, _, handle = trained(kind, 5, **options)
    first = Pipeline(kind)
    before = laconic.pipeline.compress(first.schedule, **options)
    for step in range(3):
        before.samples = order(step)
        first.train(order(step))
    file = io.BytesIO()
    torch.save(
        {
            "model": [module.state_dict() for module in first.modules],
            "optimizer": first.optimizer.state_dict(),
            "laconic": before.state_dict(buffers=buffers),
        },
        file,
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = Pipeline(kind)
    for module, state in zip(second.modules, saved["model"], strict=True):
        module.load_state_dict(state)
    second.optimizer.load_state_dict(saved["optimizer"])
    after = laconic.pipeline.compress(second.schedule, **options)
    after.load_state_dict(saved["laconic"])
    for step in range(3, 5):
        after.samples = order(step)
        second.train(order(step))
    return torch.equal(whole, second.weights), handle.digests() == after.digests(), after.digests()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_restart_from_a_checkpoint_goes_on_as_if_never_stopped(pool, kind):
    options = {"forward": "change(minmax(bits=2, block=16, rounding='stochastic'))", "samples": SAMPLES}
    found = pool.run(2, stop_and_go, kind, options, True)
    assert all(same and equal for same, equal, _ in found)
    check_sides([digests for *_, digests in found])


def test_a_restart_without_buffers_fills_them_anew(pool):
    found = pool.run(2, stop_and_go, "GPipe", TWO_BITS, False)
    assert not any(same for same, *_ in found)
    check_sides([digests for *_, digests in found])


FORWARDS = ["change(minmax(bits=4))", "change(sparse(topk(density=0.2)))", "minmax(bits=4)"]


def counted(kind, forwards, exact):
    found = []
    for forward in forwards:
        with metered() as meter:
            handle = trained(kind, 3, exact=exact, forward=forward, samples=SAMPLES)[2]
        found.append((meter, handle.stats()))
        handle.remove()
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_bytes_are_those_that_a_metered_transport_saw(pool, kind, exact):
    for found in zip(*pool.run(2, counted, kind, FORWARDS, exact), strict=True):
        for meter, stats in found:
            assert meter["sent"] == stats.forward_sent + stats.backward_sent > 0
            if exact:
                assert meter["received"] == stats.forward_received + stats.backward_received
            else:  # posted before torch's schedule fires anything
                assert meter["received"] == 0 < stats.forward_received + stats.backward_received
        (_, zero), (_, one) = found
        assert (zero.forward_sent, one.forward_sent) == (one.forward_received, zero.forward_received)
        assert (zero.backward_sent, one.backward_sent) == (one.backward_received, zero.backward_received)


def accumulates(rounds):
    """Several schedule steps for each optimiser step."""
    pipeline = Pipeline("1F1B")
    handle = laconic.pipeline.compress(pipeline.schedule, **TWO_BITS)
    for step in range(rounds):
        for part in order(step).split(4):
            handle.samples = part
            pipeline.train(part, optimise=part[-1] == order(step)[-1])
    return handle.digests()


def test_accumulation_over_several_steps_leaves_both_sides_equal(pool):
    check_sides(pool.run(2, accumulates, 5))


def evaluates():
    """A training step, an evaluation in between, and whether it left a trace."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **TWO_BITS)
    handle.samples = order(0)
    pipeline.train(order(0))
    before = handle.digests()
    pipeline.evaluate(order(1))
    after = handle.digests()
    handle.samples = order(1)
    pipeline.train(order(1))
    return before == after, handle.stats().steps, handle.digests()


def test_evaluation_needs_no_ids_and_leaves_no_trace(pool):
    found = pool.run(2, evaluates)
    assert all(same and steps == 2 for same, steps, _ in found)
    check_sides([digests for *_, digests in found])


def removed_and_by_stages(kind):
    """Whether a pipeline that was compressed is torch's own again; and one whose stages were compressed
    before there is a schedule, with ids by the stage's own attribute, that whose schedule was.
    """
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
    return back, handle.stats().steps, plain, same, by_stages.stats().steps


@pytest.mark.parametrize("kind", SCHEDULES)
def test_remove_gives_torch_its_stages_back_and_stages_can_be_given_alone(pool, kind):
    assert pool.run(2, removed_and_by_stages, kind) == [(True, 1, True, True, 3)] * 2


def on_disk(folder):
    """Weights with buffers in files, read ahead, and in RAM; the files that are left."""
    pipeline = Pipeline("1F1B")
    handle = laconic.pipeline.compress(pipeline.schedule, folder=folder, **TWO_BITS)
    for step in range(5):
        handle.upcoming = order(step + 1)
        handle.samples = order(step)
        pipeline.train(order(step))
    digests = handle.digests()
    handle.remove()
    weights, _, ram = trained("1F1B", 5, **TWO_BITS)
    return digests == ram.digests(), torch.equal(pipeline.weights, weights), digests


def test_buffers_in_files_are_those_in_ram(pool, tmp_path):
    found = pool.run(2, on_disk, str(tmp_path))
    assert all(same and equal for same, equal, _ in found)
    check_sides([digests for *_, digests in found])
    assert not list(tmp_path.iterdir())
