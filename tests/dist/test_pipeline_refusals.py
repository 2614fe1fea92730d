"""What goes wrong in a compressed pipeline is raised on every rank, nothing hangs, and training can go on."""

from __future__ import annotations

import functools
import resource
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError
from tests.dist.pipelines import (
    MICROS,
    SAMPLES,
    SCHEDULES,
    TESTED,
    Pipeline,
    block,
    check_sides,
    compressed,
    data,
    order,
    told,
    trained,
)

pytestmark = TESTED

CHANGE = {"forward": "change(minmax(bits=4))", "samples": SAMPLES}


class Spoiled(nn.Module):
    """A stage that can put a NaN into its output, or into the gradient of its input."""

    def __init__(self, index, where):
        super().__init__()
        self.inner, self.index, self.where, self.on = block(index), index, where, False

    def forward(self, x):
        out = self.inner(x)
        if self.on and self.where == ("activation", self.index):
            out = out.index_put((torch.tensor(0),), torch.tensor(float("nan")))
        if self.on and self.where == ("gradient", self.index):
            x = x * 1.0
            x.register_hook(lambda grad: grad * float("inf"))
            out = self.inner(x)
        return out


STEPS, BAD = 4, 2  # the bad one has all samples' second visits around it


def spoiled(kind, each):
    """Good steps, a bad one, a good one: what the bad one said, and both sides' digests at the end."""
    found = []
    for options, where in each:
        pipeline = Pipeline(kind, make=lambda index, where=where: Spoiled(index, where))
        handle = laconic.pipeline.compress(pipeline.schedule, **options)
        said = []
        for step in range(STEPS):
            for module in pipeline.modules:
                module.on = step == BAD
            handle.samples = order(step)
            said.append(told(lambda step=step, pipeline=pipeline: pipeline.train(order(step))))
            if said[-1] is not None:
                pipeline.optimizer.zero_grad()
        found.append((said, bool(pipeline.weights.isfinite().all()), handle.digests()))
    return found


PLACES = {  # one of each direction, and all of them in one schedule
    "1F1B": [("activation", 0), ("activation", 1), ("gradient", 2), ("gradient", 3)],
    "GPipe": [("activation", 1), ("gradient", 3)],
    "Interleaved1F1B": [("activation", 0), ("gradient", 2)],
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_nan_and_inf_are_told_on_every_rank_and_training_goes_on(pool, kind):
    size, places = 2 if kind == "Interleaved1F1B" else 4, PLACES[kind]
    everywhere = zip(*pool.run(size, spoiled, kind, [(CHANGE, where) for where in places]), strict=True)
    for (what, stage), found in zip(places, everywhere, strict=True):
        for said, finite, _ in found:
            assert [each is not None for each in said] == [step == BAD for step in range(STEPS)]
            name, text = said[BAD]
            assert name == "NonFiniteError"
            assert f"rank {stage % size}: stage {stage}, micro-batch" in text and what in text
            assert finite
        check_sides([digests for *_, digests in found])


def test_baselines_tell_of_nan_too(pool):
    baselines = {"forward": "dense()", "backward": "dense()"}, {"forward": "minmax(bits=4)"}
    for found in pool.run(2, spoiled, "1F1B", [(options, PLACES["1F1B"][0]) for options in baselines]):
        for said, finite, _ in found:
            assert said[BAD][0] == "NonFiniteError" and finite


BAD_IDS = {
    "none": (None, "needs the ids"),
    "twice": ([0, 1, 2, 3, 4, 5, 6, 0], "0 comes 2 times"),
    "large": ([0, 1, 2, 3, 4, 5, 6, SAMPLES], f"0..{SAMPLES - 1}, got {SAMPLES}"),
    "negative": ([0, 1, 2, 3, 4, 5, 6, -1], "got -1"),
    "few": ([0, 1, 2], "sample ids for a micro-batch of 2"),
    "floats": ([0.5] * 8, "vector of integers"),
}


def bad_ids(each, exact):
    """What a step with these ids says, and both sides after a good one."""
    found = []
    for ids in each:
        pipeline = Pipeline("GPipe")
        handle = compressed(pipeline, CHANGE, exact)
        handle.samples = order(0)
        pipeline.train(order(0))
        handle.samples = ids
        said = told(lambda pipeline=pipeline: pipeline.train(order(1)))
        handle.samples = order(1)
        pipeline.train(order(1))
        found.append((said, handle.digests()))
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
def test_bad_ids_are_told_on_every_rank(pool, exact):
    told_of = [BAD_IDS[name] for name in (("none", "few") if exact else BAD_IDS)]  # lengths follow from ids
    cases = zip(*pool.run(2, bad_ids, [ids for ids, _ in told_of], exact), strict=True)
    for (_, words), found in zip(told_of, cases, strict=True):
        for said, _ in found:
            assert said[0] == "StateError" and words in said[1]
        check_sides([digests for _, digests in found])


def own_ids():
    """Each rank gives other ids; with messages up to a length, and of an exact one."""
    found = []
    for exact in (False, True):
        pipeline = Pipeline("1F1B")
        handle = compressed(pipeline, CHANGE, exact)
        handle.samples = order(pipeline.rank)
        found.append(told(lambda pipeline=pipeline: pipeline.train(order(0))))
    return found


def test_ids_that_differ_by_rank_are_told_on_every_rank(pool):
    for found in pool.run(4, own_ids):
        for name, text in found:
            assert name in ("WireError", "StateError") and "ids" in text


def loaded_by_one():
    """Rank 0 goes back to an older state, rank 1 does not."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    states = []
    for step in range(4):
        handle.samples = order(step)
        pipeline.train(order(step))
        states.append(handle.state_dict())
    if pipeline.rank == 0:
        handle.load_state_dict(states[1])
    handle.samples = order(4)
    said = told(lambda: pipeline.train(order(4)))
    handle.load_state_dict(states[2])
    handle.samples = order(3)
    pipeline.train(order(3))
    return said, handle.digests()


def test_states_of_two_checkpoints_are_told_on_every_rank(pool):
    found = pool.run(2, loaded_by_one)
    for said, _ in found:
        assert said[0] == "WireError" and "one checkpoint" in said[1]
    check_sides([digests for _, digests in found])


def longer(kind):
    """The second batch has longer sequences than the first, its targets too or not."""
    return [_longer(kind, both) for both in (False, True)]


def _longer(kind, both):
    pipeline = Pipeline(kind)
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = []
    for step, long in enumerate((6, 9, 6)):
        handle.samples = order(step)
        x, target = torch.ones(8, long, 16), torch.zeros(8, long if both else 6, 16)
        args, kwargs = ([x] if pipeline.first else []), ({"target": target} if pipeline.last else {})
        said.append(told(lambda args=args, kwargs=kwargs: pipeline.schedule.step(*args, **kwargs)))
    return said, handle.digests()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_shapes_that_change_are_told_on_every_rank(pool, kind):
    for found in zip(*pool.run(4 if kind == "1F1B" else 2, longer, kind), strict=True):
        for said, _ in found:
            (name, text), *others = said[1], said[0], said[2]
            assert others == [None, None]
            assert name == "StateError" and "(2, 9, 16)" in text and "alike" in text
        check_sides([digests for _, digests in found])


class Raises(nn.Module):
    """A stage that fails at will, in forward or in backward."""

    def __init__(self, index):
        super().__init__()
        self.inner, self.index, self.on = block(index), index, ""

    def forward(self, x):
        if self.index == 1 and self.on == "forward":
            raise ValueError("my own mistake")
        out = self.inner(x)
        if self.index == 1 and self.on == "backward" and out.requires_grad:
            out.register_hook(self.refuse)
        return out

    def refuse(self, grad):
        raise ValueError("my own mistake")


def raises(kind):
    return [_raises(kind, where) for where in WHERES]


def _raises(kind, where):
    pipeline = Pipeline(kind, make=Raises)
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = []
    for step in range(4):
        for module in pipeline.modules:
            module.on = where if step == 2 else ""
        handle.samples = order(step)
        said.append(told(lambda step=step: pipeline.train(order(step))))
        pipeline.optimizer.zero_grad()
    return said, handle.digests()


WHERES = ("forward", "backward")


@pytest.mark.parametrize("kind", [*SCHEDULES, "ZBVZeroBubble"])
def test_a_stage_that_raises_is_told_on_every_rank(pool, kind):
    for where, found in zip(WHERES, zip(*pool.run(2, raises, kind), strict=True), strict=True):
        for said, _ in found:
            assert [each is not None for each in said] == [False, False, True, False]
            assert said[2][0] == "PeerError" and f"stage 1, micro-batch 0, {where}" in said[2][1]
        check_sides([digests for _, digests in found])


def forgotten(kind):
    """What is said of steps without targets, first and later, of a short batch, and of the next step."""
    pipeline = Pipeline(kind)
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    x, y = data()

    def step(ids, **target):
        args = [x[ids]] if pipeline.first else []
        return handle.step(*args, samples=ids, **(target if pipeline.last else {}))

    short, whole = torch.arange(MICROS - 1), order(0)
    steps = [(whole, {}), (whole, {"target": y[whole]}), (whole, {}), (short, {"target": y[short]})]
    return [told(lambda ids=ids, target=target: step(ids, **target)) for ids, target in [*steps, steps[1]]]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_no_target_and_a_short_batch_are_told_on_every_rank(pool, kind):
    for first, whole, later, short, after in pool.run(2, forgotten, kind):
        for targetless in (first, later):
            assert targetless[0] == "StateError" and "the loss has no target" in targetless[1]
        assert short[0] == "StateError" and "3 samples cannot be split into 4" in short[1]
        assert whole is after is None


def short(options, first):
    """What is said where the batch is short on the ranks that have it, and of good steps around it.

    `first`: whether it comes before any good one, too.
    """
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **options)
    said = []
    for step, rows in enumerate([3] * first + [8, 3, 8, 0, 8]):
        if "samples" in options:
            handle.samples = order(step)[:rows] if rows else order(step)
        said.append(told(lambda step=step, rows=rows: pipeline.train(order(step)[:rows])))
        pipeline.optimizer.zero_grad()
    return said


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("options", [CHANGE, {"spec": "minmax(bits=4)"}], ids=["change", "direct"])
def test_a_short_batch_leaves_no_rank_behind(pool, options, first):
    for said in pool.run(3, short, options, first):
        said = said[first:]
        assert [each is None for each in said] == [True, False, True, False, True]
        for (name, text), rows in zip(said[1::2], (3, 0), strict=True):
            assert name == "StateError" and f"{rows} samples cannot be split into 4" in text


def own_number_of_ids():
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = []
    for few in (False, True, False):
        ids = order(0)[:3] if few and pipeline.rank == 0 else order(0)
        step = functools.partial(handle.step, samples=ids)
        said.append(told(lambda step=step: pipeline.train(order(0), step)))
        pipeline.optimizer.zero_grad()
    return said


def test_too_few_ids_on_one_rank_are_told_on_every_rank(pool):
    for before, (name, text), after in pool.run(3, own_number_of_ids):
        assert name == "StateError" and "3 samples cannot be split into 4" in text
        assert before is after is None


def evaluated(options, batches):
    """Steps and evaluations of these sizes; torch's own pipeline without options."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **options) if options else None
    said = []
    for training, rows in batches:
        ids = order(0, SAMPLES)[:rows]
        if handle is not None and training and "samples" in options:
            handle.samples = ids
        said.append(told(lambda ids=ids, do=pipeline.train if training else pipeline.evaluate: do(ids)))
    return said, pipeline.weights


BATCHES = [(False, 4), (True, 8), (False, 4), (True, 8), (False, 16), (False, 16), (True, 8)]


@pytest.mark.parametrize("options", [CHANGE, {"spec": "dense()"}], ids=["change", "dense"])
def test_evaluation_takes_batches_of_another_size_as_torch_does(pool, options):
    plain, found = pool.run(3, evaluated, {}, BATCHES), pool.run(3, evaluated, options, BATCHES)
    for (said, weights), (own, ours) in zip(plain, found, strict=True):
        assert said == own == [None] * len(BATCHES)
        assert options is CHANGE or torch.equal(weights, ours)


def short_evaluations(options):
    """What is said of a short batch that begins an evaluation, of no_grad, and of good steps."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **options)
    said = []
    for training, rows in [(True, 8), (False, 3), (False, 16), (False, 16), (True, 8), (False, 16)]:
        ids = order(0, SAMPLES)[:rows]
        if training and "samples" in options:
            handle.samples = ids
        said.append(told(lambda ids=ids, do=pipeline.train if training else pipeline.evaluate: do(ids)))
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires gradients"):
        pipeline.train(order(0)[:3])
    if "samples" in options:
        handle.samples = order(0)
    return said, told(lambda: pipeline.train(order(0)))


@pytest.mark.parametrize("options", [CHANGE, {"spec": "minmax(bits=4)"}], ids=["change", "direct"])
def test_a_short_batch_spoils_no_later_evaluation(pool, options):
    for said, after in pool.run(3, short_evaluations, options):
        assert [each is None for each in said] == [True, False, True, True, True, True]
        assert "3 samples cannot be split" in said[1][1] and after is None


class Whole(nn.Module):
    """A stage with an integer beside its output."""

    def __init__(self, index):
        super().__init__()
        self.inner, self.index = block(index), index

    def forward(self, x, mask=None):
        out = self.inner(x)
        return (out, (x > 0).long()) if self.index == 0 else out


def integers(options):
    pipeline = Pipeline("GPipe", make=Whole)
    handle = laconic.pipeline.compress(pipeline.schedule, **options)
    handle.samples = order(0)
    return told(lambda: pipeline.train(order(0)))


def test_integers_between_stages_are_told_on_every_rank(pool):
    for name, text in pool.run(4, integers, CHANGE):
        assert name == "AttachError" and "torch.int64" in text and "floating-point" in text
    assert pool.run(2, integers, {"forward": "dense()", "backward": "dense()"}) == [None, None]


def too_large(each):
    found = []
    for most_bytes in each:
        pipeline = Pipeline("GPipe")
        handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE, most_bytes=most_bytes)
        handle.samples = order(0)
        found.append(told(lambda pipeline=pipeline: pipeline.train(order(0))))
    return found


def test_buffers_above_their_bound_are_told_on_every_rank_with_the_size_needed(pool):
    needed = SAMPLES * 6 * 16 * 4
    for (name, text), enough in pool.run(2, too_large, [needed - 1, needed]):
        assert name == "StateError" and f"needs {needed:,} bytes" in text and f"{needed - 1:,}" in text
        assert enough is None


def full_disk(folder, later):
    """Files may not grow beyond a page: from the start, or once the file is there (as a disk that fails)."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, folder=folder, **CHANGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    try:
        for step in range(4):
            if pipeline.rank == 1 and step == (2 if later else 0):
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            handle.samples = order(step)
            said.append(told(lambda step=step: pipeline.train(order(step))))
            for each in handle._changes():
                if each.buffer.opened:
                    told(each.buffer.memory.flush)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return said


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_full_disk_is_told_on_every_rank(pool, tmp_path, later):
    for said in pool.run(2, full_disk, str(tmp_path), later):
        first = next(each for each in said if each is not None)
        assert first[0] == "OSError" and "do not fit" in first[1] and "rank 1" in first[1]
        assert said.index(first) in ((2, 3) if later else (0,))  # the thread that writes may be late


def once():
    """One epoch warns, and two do not, where warnings are errors."""
    for epochs in (1, 2):
        handle = trained("GPipe", epochs * SAMPLES // 8, **CHANGE)[2]
        with pytest.warns(UserWarning, match="none again") if epochs == 1 else nullcontext():
            handle.remove()
    return True


def test_traffic_of_first_visits_alone_is_warned_about(pool):
    assert pool.run(2, once) == [True, True]


WRONG = {
    "no samples": ({"forward": "change(minmax(bits=4))"}, SpecError, "samples=len"),
    "no size": ({"forward": "change(minmax(4))", "samples": 9, "keep": "topk(0.1)"}, SpecError, "fixed size"),
    "a method": ({"spec": "dgc()"}, SpecError, "ac_sgd"),
    "no codec": ({"forward": "sum()"}, SpecError, "codec"),
    "variance": ({"forward": "change(minmax(bits=1))", "samples": 9}, UserWarning, "leaves 5"),
}


def wrong(each):
    """The classes and words of what is raised."""
    found = []
    for options in each:
        try:
            laconic.pipeline.compress(Pipeline("GPipe").schedule, **options)
        except (LaconicError, UserWarning) as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_wrong_arguments_are_told(pool):
    for found in pool.run(2, wrong, [options for options, *_ in WRONG.values()]):
        for (_, kind, words), (name, text) in zip(WRONG.values(), found, strict=True):
            assert name == kind.__name__ and words in text


def unlike():
    pipeline = Pipeline("GPipe")
    bits = 4 + pipeline.rank
    kinds = [type(stage) for stage in pipeline.stages]
    said = told(lambda: laconic.pipeline.compress(pipeline.schedule, forward=f"minmax(bits={bits})"))
    return said, kinds == [type(stage) for stage in pipeline.stages]


def test_ranks_that_disagree_attach_nothing(pool):
    for (name, text), clean in pool.run(2, unlike):
        assert name == "AttachError" and "forward differs" in text and clean


def twice():
    pipeline = Pipeline("GPipe")
    laconic.pipeline.compress(pipeline.schedule, forward="dense()")
    again = told(lambda: laconic.pipeline.compress(pipeline.schedule, forward="dense()"))
    other = told(lambda: laconic.pipeline.compress(nn.Linear(2, 2)))
    return again, other


def test_what_cannot_be_compressed_is_refused(pool):
    for again, other in pool.run(2, twice):
        assert again[0] == other[0] == AttachError.__name__
        assert "already" in again[1] and "Linear" in other[1]
