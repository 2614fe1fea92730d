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


def dense(kind):
    """Weights of torch's own pipeline and of one that sends everything as it is, and the bytes."""
    plain, plain_losses, _ = trained(kind, 6)
    ours, losses, handle = trained(kind, 6, forward="dense()", backward="dense()")
    stats = handle.stats()
    handle.remove()
    return torch.equal(plain, ours), plain_losses == losses, stats


@pytest.mark.parametrize("kind, size", CASES)
def test_dense_is_bit_equal_to_the_plain_schedule(pool, kind, size):
    for same, equal_losses, stats in pool.run(size, dense, kind):
        assert same and equal_losses
        assert stats.steps == 6
        assert stats.forward_sent + stats.backward_sent > stats.dense_forward + stats.dense_backward


def by_one_spec(spec):
    handle = trained("GPipe", 1, spec=spec, samples=SAMPLES)[2]
    return repr(handle.plan.forward), repr(handle.plan.backward)


def test_one_spec_says_both_directions(pool):
    for spec, forward, backward in (
        ("ac_sgd(forward=2)", "change(minmax(bits=2, block=128))", "minmax(bits=8, block=128)"),
        ("change(dense())", "change(dense())", "minmax(bits=8)"),
        ("cast('fp16')", "cast(dtype='fp16')", "cast(dtype='fp16')"),
    ):
        assert pool.run(2, by_one_spec, spec) == [(forward, backward)] * 2


def sides(kind, steps, options):
    handle = trained(kind, steps, **options)[2]
    return handle.digests(), handle.stats()


@pytest.mark.parametrize("kind, size", CASES)
def test_both_sides_of_a_boundary_are_equal_bit_for_bit(pool, kind, size):
    found = pool.run(size, sides, kind, 12, TWO_BITS)
    check_sides([digests for digests, _ in found])
    assert all(stats.changes > stats.first_visits > 0 for _, stats in found)


@pytest.mark.parametrize(
    "options",
    [
        {"forward": "change(minmax(bits=1, block=4, rounding='stochastic'), first='fp32')", "seed": 3},
        {"forward": "change(minmax(bits=4, block=16), first='fp16')", "keep": "cast('fp16')"},
        {"forward": "change(minmax(bits=3), first='bf16')", "keep": "minmax(bits=8)"},
        {"forward": "change(sparse(topk(density=0.5)))", "backward": "topk(density=0.5)"},
        {
            "forward": "change(qsgd(levels=15))",
            "backward": "qsgd(levels=127)",
            "keep": "minmax(8, 16, 'stochastic')",
        },
    ],
    ids=lambda options: options["forward"],
)
def test_any_codec_and_any_keeping_leaves_both_sides_equal(pool, options):
    found = pool.run(2, sides, "1F1B", 9, {"samples": SAMPLES, **options})
    check_sides([digests for digests, _ in found])


def test_a_thousand_steps_leave_both_sides_equal(pool):
    found = pool.run(2, sides, "1F1B", 1000, TWO_BITS, timeout_s=300.0)
    check_sides([digests for digests, _ in found])


@pytest.mark.soak
@pytest.mark.parametrize("kind, size", CASES)
def test_a_thousand_steps_leave_both_sides_equal_in_all_schedules(pool, kind, size):
    found = pool.run(size, sides, kind, 1000, TWO_BITS, timeout_s=900.0)
    check_sides([digests for digests, _ in found])


def learns(options):
    return trained("GPipe", 60, **options)[1]


def test_change_coding_trains_as_torchs_own_pipeline_where_direct_quantisation_does_not(pool):
    def last(options):
        return sum(pool.run(2, learns, options)[1][-6:]) / 6

    plain, change = last({}), last({"forward": "change(minmax(bits=2))", "samples": SAMPLES})
    direct = last({"forward": "minmax(bits=2)"})
    assert abs(change / plain - 1) < 0.01
    assert direct / plain - 1 > 3 * abs(change / plain - 1)


def stop_and_go(kind, options, buffers):
    """Weights after eleven steps, and after five then six of objects that were restored."""
    whole, _, handle = trained(kind, 11, **options)
    first = Pipeline(kind)
    before = laconic.pipeline.compress(first.schedule, **options)
    for step in range(5):
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
    for step in range(5, 11):
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


def counted(kind, options, exact):
    with metered() as meter:
        handle = trained(kind, 5, exact=exact, **options)[2]
    return meter, handle.stats(), handle.digests()


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    "forward", ["change(minmax(bits=4))", "change(sparse(topk(density=0.2)))", "minmax(bits=4)"]
)
def test_bytes_are_those_that_a_metered_transport_saw(pool, kind, forward, exact):
    options = {"forward": forward, "samples": SAMPLES}
    found = pool.run(2, counted, kind, options, exact)
    for meter, stats, _ in found:
        assert meter["sent"] == stats.forward_sent + stats.backward_sent > 0
        if exact:
            assert meter["received"] == stats.forward_received + stats.backward_received
        else:  # posted before torch's schedule fires anything
            assert meter["received"] == 0 < stats.forward_received + stats.backward_received
    (_, zero, _), (_, one, _) = found
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
    check_sides(pool.run(2, accumulates, 9))


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


def removed(kind):
    """Losses of a pipeline that was compressed and is torch's own again."""
    pipeline = Pipeline(kind)
    classes = [type(stage) for stage in pipeline.stages]
    handle = laconic.pipeline.compress(pipeline.schedule, forward="dense()", backward="dense()")
    for step in range(3):
        pipeline.train(order(step))
    handle.remove()
    handle.remove()
    back = [type(stage) for stage in pipeline.stages] == classes
    for step in range(3, 6):
        pipeline.train(order(step))
    return back, handle.stats().steps, torch.equal(pipeline.weights, trained(kind, 6)[0])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_remove_gives_torch_its_stages_back(pool, kind):
    assert pool.run(2, removed, kind) == [(True, 3, True)] * 2


def by_stages(kind):
    """Compressed before there is a schedule; ids by the stage's own attribute."""
    pipeline = Pipeline(kind)
    handle = laconic.pipeline.compress(pipeline.stages, **TWO_BITS)
    for step in range(6):
        pipeline.stages[0].samples = order(step)
        pipeline.train(order(step))
    return torch.equal(pipeline.weights, trained(kind, 6, **TWO_BITS)[0]), handle.stats().steps


@pytest.mark.parametrize("kind", SCHEDULES)
def test_stages_can_be_given_in_place_of_their_schedule(pool, kind):
    assert pool.run(2, by_stages, kind) == [(True, 6)] * 2


def on_disk(folder):
    """Weights with buffers in files, read ahead, and in RAM; the files that are left."""
    pipeline = Pipeline("1F1B")
    handle = laconic.pipeline.compress(pipeline.schedule, folder=folder, **TWO_BITS)
    for step in range(12):
        handle.upcoming = order(step + 1)
        handle.samples = order(step)
        pipeline.train(order(step))
    digests = handle.digests()
    handle.remove()
    _, _, ram = trained("1F1B", 12, **TWO_BITS)
    return (
        digests == ram.digests(),
        torch.equal(pipeline.weights, trained("1F1B", 12, **TWO_BITS)[0]),
        digests,
    )


def test_buffers_in_files_are_those_in_ram(pool, tmp_path):
    found = pool.run(2, on_disk, str(tmp_path))
    assert all(same and equal for same, equal, _ in found)
    check_sides([digests for *_, digests in found])
    assert not list(tmp_path.iterdir())
