"""What goes wrong in a compressed pipeline is raised on every rank, nothing hangs, and training can go on."""

from __future__ import annotations

import functools
import resource
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

import laconic
from laconic.core.errors import AttachError, SpecError
from tests.dist.pipelines import (
    CHANGE,
    MICROS,
    SAMPLES,
    SCHEDULES,
    TESTED,
    Pipeline,
    agree_on_sides,
    begun,
    block,
    data,
    order,
    stepped,
    told,
    trained,
)  # fmt: skip
from tests.dist.pool import on_ranks

pytestmark = TESTED


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


def spoiled(kind, what, stage, **options):
    """Check that good steps, a bad one and a good one leave a sound pipeline; what the bad one said."""
    pipeline, handle = begun(kind, make=lambda index: Spoiled(index, (what, stage)), **options)
    said = []
    for step in range(STEPS):
        for module in pipeline.modules:
            module.on = step == BAD
        said.append(stepped(pipeline, handle, order(step)))
    assert [each is not None for each in said] == [step == BAD for step in range(STEPS)]
    name, text = said[BAD]
    assert name == "NonFiniteError" and bool(pipeline.weights.isfinite().all())
    assert f"rank {stage % pipeline.size}: stage {stage}, micro-batch" in text and what in text
    return handle


PLACES = [  # one of each direction, and all of them in one schedule
    *(("1F1B", what, stage) for stage, what in enumerate(2 * ["activation"] + 2 * ["gradient"])),
    *(("GPipe", "activation", 1), ("GPipe", "gradient", 3)),
]


@on_ranks(4, PLACES)
def test_nan_and_inf_are_told_on_every_rank_and_training_goes_on(kind, what, stage):
    agree_on_sides(spoiled(kind, what, stage))


@on_ranks(2, (("activation", 0), ("gradient", 2)))
def test_nan_and_inf_between_stages_by_turns_are_told_on_every_rank(what, stage):
    agree_on_sides(spoiled("Interleaved1F1B", what, stage))


@on_ranks(2)
def test_baselines_tell_of_nan_too():
    spoiled("1F1B", "activation", 0, forward="dense()", backward="dense()")
    spoiled("1F1B", "activation", 0, forward="minmax(bits=4)")


BAD_IDS = [
    (None, "needs the ids", False),
    ([0, 1, 2], "sample ids for a micro-batch of 2", False),
    ([0, 1, 2, 3, 4, 5, 6, 0], "must be unique, got 0 2 times", False),
    ([0, 1, 2, 3, 4, 5, 6, SAMPLES], f"0..{SAMPLES - 1}, got {SAMPLES}", False),
    ([0, 1, 2, 3, 4, 5, 6, -1], "got -1", False),
    ([0.5] * 8, "vector of integers", False),
    (None, "needs the ids", True),  # lengths follow from ids
    ([0, 1, 2], "sample ids for a micro-batch of 2", True),
]


@on_ranks(2, BAD_IDS)
def test_bad_ids_are_told_on_every_rank(ids, words, exact):
    pipeline, handle = begun(exact=exact)
    assert stepped(pipeline, handle, order(0)) is None
    handle.samples = ids
    name, text = told(lambda: pipeline.train(order(1)))
    assert name == "StateError" and words in text
    assert stepped(pipeline, handle, order(1)) is None
    agree_on_sides(handle)


@on_ranks(4, (False, True))
def test_ids_that_differ_by_rank_are_told_on_every_rank(exact):
    """With messages up to a length, and of an exact one."""
    pipeline, handle = begun("1F1B", exact)
    name, text = stepped(pipeline, handle, order(0), order(pipeline.rank))
    assert name in ("WireError", "StateError") and "ids" in text


@on_ranks(2)
def test_states_of_two_checkpoints_are_told_on_every_rank():
    """Rank 0 goes back to an older state, rank 1 does not."""
    pipeline, handle = begun()
    states = []
    for step in range(4):
        assert stepped(pipeline, handle, order(step)) is None
        states.append(handle.state_dict())
    if pipeline.rank == 0:
        handle.load_state_dict(states[1])
    name, text = stepped(pipeline, handle, order(4))
    assert name == "WireError" and "one checkpoint" in text
    handle.load_state_dict(states[2])
    assert stepped(pipeline, handle, order(3)) is None
    agree_on_sides(handle)


def longer(kind, both):
    """The second batch has longer sequences than the first, its targets too or not."""
    pipeline, handle = begun(kind)
    said = []
    for step, long in enumerate((6, 9, 6)):
        handle.samples = order(step)
        x, target = torch.ones(8, long, 16), torch.zeros(8, long if both else 6, 16)
        args, kwargs = ([x] if pipeline.first else []), ({"target": target} if pipeline.last else {})
        said.append(told(lambda args=args, kwargs=kwargs: pipeline.schedule.step(*args, **kwargs)))
    before, (name, text), after = said
    assert before is after is None
    assert name == "StateError" and "(2, 9, 16)" in text and "one shape" in text
    agree_on_sides(handle)


@on_ranks(2, product(("GPipe", "Interleaved1F1B"), (False, True)))
def test_shapes_that_change_are_told_on_every_rank(kind, both):
    longer(kind, both)


@on_ranks(4, (False, True))
def test_shapes_that_change_are_told_on_every_rank_of_a_longer_pipeline(both):
    longer("1F1B", both)


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


@on_ranks(2, product((*SCHEDULES, "ZBVZeroBubble"), ("forward", "backward")))
def test_a_stage_that_raises_is_told_on_every_rank(kind, where):
    pipeline, handle = begun(kind, make=Raises)
    said = []
    for step in range(4):
        for module in pipeline.modules:
            module.on = where if step == 2 else ""
        said.append(stepped(pipeline, handle, order(step)))
    assert [each is not None for each in said] == [False, False, True, False]
    assert said[2][0] == "PeerError" and f"stage 1, micro-batch 0, {where}" in said[2][1]
    agree_on_sides(handle)


@on_ranks(2, SCHEDULES)
def test_no_target_and_a_short_batch_are_told_on_every_rank(kind):
    pipeline, handle = begun(kind)
    x, y = data()

    def step(ids, **target):
        args = [x[ids]] if pipeline.first else []
        return handle.step(*args, samples=ids, **(target if pipeline.last else {}))

    short, whole = torch.arange(MICROS - 1), order(0)
    steps = [(whole, {}), (whole, {"target": y[whole]}), (whole, {}), (short, {"target": y[short]})]
    first, whole, later, short, after = [
        told(lambda ids=ids, target=target: step(ids, **target)) for ids, target in [*steps, steps[1]]
    ]
    for targetless in (first, later):
        assert targetless[0] == "StateError" and "the loss has no target" in targetless[1]
    assert short[0] == "StateError" and "3 samples cannot be split into 4" in short[1]
    assert whole is after is None


DIRECT = {"spec": "minmax(bits=4)"}


@on_ranks(3, product((CHANGE, DIRECT), (False, True)))
def test_a_short_batch_leaves_no_rank_behind(options, first):
    """Of the ranks that have it; `first`: it comes before any good one, too."""
    pipeline, handle = begun(**options)
    for step, rows in enumerate([3] * first + [8, 3, 8, 0, 8]):
        if "samples" in options:
            handle.samples = order(step)[:rows] if rows else order(step)
        said = told(lambda step=step, rows=rows: pipeline.train(order(step)[:rows]))
        pipeline.optimizer.zero_grad()
        if rows == 8:
            assert said is None
        else:
            assert said[0] == "StateError" and f"{rows} samples cannot be split into 4" in said[1]


@on_ranks(3)
def test_too_few_ids_on_one_rank_are_told_on_every_rank():
    pipeline, handle = begun()
    said = []
    for few in (False, True, False):
        ids = order(0)[:3] if few and pipeline.rank == 0 else order(0)
        step = functools.partial(handle.step, samples=ids)
        said.append(told(lambda step=step: pipeline.train(order(0), step)))
        pipeline.optimizer.zero_grad()
    before, (name, text), after = said
    assert name == "StateError" and "3 samples cannot be split into 4" in text
    assert before is after is None


def alternating(pipeline, handle, batches):
    """The errors of steps and evaluations of these sizes."""
    said = []
    for training, rows in batches:
        ids = order(0, SAMPLES)[:rows]
        if training and handle is not None and handle.plan.samples:
            handle.samples = ids
        said.append(told(lambda ids=ids, do=pipeline.train if training else pipeline.evaluate: do(ids)))
    return said


BATCHES = [(False, 4), (True, 8), (False, 4), (True, 8), (False, 16), (False, 16), (True, 8)]


@on_ranks(3, (CHANGE, {"spec": "dense()"}))
def test_evaluation_takes_batches_of_another_size_as_torch_does(options):
    plain = Pipeline()
    pipeline, handle = begun(**options)
    assert (
        alternating(plain, None, BATCHES) == alternating(pipeline, handle, BATCHES) == [None] * len(BATCHES)
    )
    assert options == CHANGE or torch.equal(plain.weights, pipeline.weights)


@on_ranks(3, (CHANGE, DIRECT))
def test_a_short_batch_spoils_no_later_evaluation(options):
    pipeline, handle = begun(**options)
    batches = [(True, 8), (False, 3), (False, 16), (False, 16), (True, 8), (False, 16)]
    said = alternating(pipeline, handle, batches)
    assert [each is None for each in said] == [True, False, True, True, True, True]
    assert "3 samples cannot be split" in said[1][1]
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires gradients"):
        pipeline.train(order(0)[:3])
    assert alternating(pipeline, handle, [(True, 8)]) == [None]


class Whole(nn.Module):
    """A stage with an integer beside its output."""

    def __init__(self, index):
        super().__init__()
        self.inner, self.index = block(index), index

    def forward(self, x, mask=None):
        out = self.inner(x)
        return (out, (x > 0).long()) if self.index == 0 else out


@on_ranks(4)
def test_integers_between_stages_are_told_on_every_rank():
    name, text = stepped(*begun(make=Whole), order(0))
    assert name == "AttachError" and "torch.int64" in text and "floating-point" in text


@on_ranks(2)
def test_integers_cross_as_they_are_where_nothing_is_coded():
    assert stepped(*begun(make=Whole, forward="dense()", backward="dense()"), order(0)) is None


@on_ranks(2)
def test_buffers_above_their_bound_are_told_on_every_rank_with_the_size_needed():
    needed = SAMPLES * 6 * 16 * 4
    name, text = stepped(*begun(**CHANGE, most_bytes=needed - 1), order(0))
    assert name == "StateError" and f"needs {needed:,} bytes" in text and f"{needed - 1:,}" in text
    assert stepped(*begun(**CHANGE, most_bytes=needed), order(0)) is None


def full_disk(folder, later):
    """Files may not grow beyond a page: from the start, or once the file is there (as a disk that fails)."""
    pipeline, handle = begun(folder=folder, **CHANGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    try:
        for step in range(4):
            if pipeline.rank == 1 and step == (2 if later else 0):
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            said.append(stepped(pipeline, handle, order(step)))
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


@on_ranks(2)
def test_traffic_of_first_visits_alone_is_warned_about():
    """One epoch warns, and two do not, where warnings are errors."""
    for epochs in (1, 2):
        handle = trained("GPipe", epochs * SAMPLES // 8, **CHANGE)[2]
        with pytest.warns(UserWarning, match="none again") if epochs == 1 else nullcontext():
            handle.remove()


WRONG = [
    ({"forward": "change(minmax(bits=4))"}, SpecError, "samples=len"),
    ({"forward": "change(minmax(4))", "samples": 9, "keep": "topk(0.1)"}, SpecError, "fixed size"),
    ({"spec": "dgc()"}, SpecError, "ac_sgd"),
    ({"forward": "sum()"}, SpecError, "codec"),
    ({"forward": "change(minmax(bits=1))", "samples": 9}, UserWarning, "loses 5"),
]


@on_ranks(2, WRONG)
def test_wrong_arguments_are_told(options, kind, words):
    with pytest.raises(kind, match=words):
        begun(**options)


@on_ranks(2)
def test_ranks_that_disagree_attach_nothing():
    pipeline = Pipeline()
    kinds = [type(stage) for stage in pipeline.stages]
    with pytest.raises(AttachError, match="forward differs"):
        laconic.pipeline.compress(pipeline.schedule, forward=f"minmax(bits={4 + pipeline.rank})")
    assert kinds == [type(stage) for stage in pipeline.stages]


@on_ranks(2)
def test_what_cannot_be_compressed_is_refused():
    pipeline, _ = begun(forward="dense()")
    with pytest.raises(AttachError, match="already"):
        laconic.pipeline.compress(pipeline.schedule, forward="dense()")
    with pytest.raises(AttachError, match="Linear"):
        laconic.pipeline.compress(nn.Linear(2, 2))
