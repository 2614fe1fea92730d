"""What goes wrong in a compressed pipeline is raised on every rank, nothing hangs, and training can go on."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError
from tests.dist.pipelines import (
    SAMPLES,
    SCHEDULES,
    TESTED,
    Pipeline,
    block,
    check_sides,
    compressed,
    order,
    trained,
)

pytestmark = TESTED

CHANGE = {"forward": "change(minmax(bits=4))", "samples": SAMPLES}


def told(call):
    """The error that a call raises, as its class and words."""
    try:
        call()
    except (LaconicError, OSError) as error:
        return type(error).__name__, str(error)
    return None


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


def spoiled(kind, options, where):
    """Good steps, a bad one, good ones: what the bad one said, and both sides' digests at the end."""
    pipeline = Pipeline(kind, make=lambda index: Spoiled(index, where))
    handle = laconic.pipeline.compress(pipeline.schedule, **options)
    said = []
    for step in range(9):
        for module in pipeline.modules:
            module.on = step == 4
        handle.samples = order(step)
        said.append(told(lambda step=step: pipeline.train(order(step))))
        if said[-1] is not None:
            pipeline.optimizer.zero_grad()
    finite = bool(pipeline.weights.isfinite().all())
    return said, finite, handle.digests()


@pytest.mark.parametrize("where", [("activation", 0), ("activation", 1), ("gradient", 2), ("gradient", 3)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_nan_and_inf_are_told_on_every_rank_and_training_goes_on(pool, kind, where):
    size = 2 if kind == "Interleaved1F1B" else 4
    found = pool.run(size, spoiled, kind, CHANGE, where)
    for said, finite, _ in found:
        assert [each is not None for each in said] == [step == 4 for step in range(9)]
        name, text = said[4]
        assert name == "NonFiniteError"
        assert f"rank {where[1] % size}: stage {where[1]}, micro-batch" in text and where[0] in text
        assert finite
    check_sides([digests for *_, digests in found])


@pytest.mark.parametrize(
    "options", [{"forward": "dense()", "backward": "dense()"}, {"forward": "minmax(bits=4)"}]
)
def test_baselines_tell_of_nan_too(pool, options):
    for said, finite, _ in pool.run(2, spoiled, "1F1B", options, ("activation", 0)):
        assert said[4][0] == "NonFiniteError" and finite


BAD_IDS = {
    "none": (None, "needs the ids"),
    "twice": ([0, 1, 2, 3, 4, 5, 6, 0], "0 comes 2 times"),
    "large": ([0, 1, 2, 3, 4, 5, 6, 24], "0..23, got 24"),
    "negative": ([0, 1, 2, 3, 4, 5, 6, -1], "got -1"),
    "few": ([0, 1, 2], "sample ids for a micro-batch of 2"),
    "floats": ([0.5] * 8, "vector of integers"),
}


def bad_ids(ids, exact):
    """What a step with these ids says, and both sides after a good one."""
    pipeline = Pipeline("GPipe")
    handle = compressed(pipeline, CHANGE, exact)
    handle.samples = order(0)
    pipeline.train(order(0))
    handle.samples = ids
    said = told(lambda: pipeline.train(order(1)))
    handle.samples = order(1)
    pipeline.train(order(1))
    return said, handle.digests()


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("ids, words", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_ids_are_told_on_every_rank(pool, ids, words, exact):
    found = pool.run(2, bad_ids, ids, exact)
    for said, _ in found:
        assert said[0] == "StateError" and words in said[1]
    check_sides([digests for _, digests in found])


def own_ids(exact):
    """Each rank gives other ids."""
    pipeline = Pipeline("1F1B")
    handle = compressed(pipeline, CHANGE, exact)
    handle.samples = order(pipeline.rank)
    return told(lambda: pipeline.train(order(0)))


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
def test_ids_that_differ_by_rank_are_told_on_every_rank(pool, exact):
    for name, text in pool.run(4, own_ids, exact):
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


def longer(kind, both):
    """The second batch has longer sequences than the first, its targets too or not."""
    pipeline = Pipeline(kind)
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = []
    for step, long in enumerate((6, 9, 6)):
        handle.samples = order(step)
        x, target = torch.ones(8, long, 16), torch.zeros(8, long if both else 6, 16)
        args, kwargs = ([x] if pipeline.first else []), ({"target": target} if pipeline.last else {})
        said.append(told(lambda args=args, kwargs=kwargs: pipeline.schedule.step(*args, **kwargs)))
    return said, handle.digests()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_shapes_that_change_are_told_on_every_rank(pool, kind, both):
    found = pool.run(4, longer, kind, both)
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


def raises(kind, where):
    pipeline = Pipeline(kind, make=Raises)
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = []
    for step in range(6):
        for module in pipeline.modules:
            module.on = where if step == 3 else ""
        handle.samples = order(step)
        said.append(told(lambda step=step: pipeline.train(order(step))))
        pipeline.optimizer.zero_grad()
    return said, handle.digests()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [*SCHEDULES, "ZBVZeroBubble"])
def test_a_stage_that_raises_is_told_on_every_rank(pool, kind, where):
    found = pool.run(2, raises, kind, where)
    for said, _ in found:
        assert [each is not None for each in said] == [False, False, False, True, False, False]
        assert said[3][0] == "PeerError" and f"stage 1, micro-batch 0, {where}" in said[3][1]
    check_sides([digests for _, digests in found])


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


def too_large(options):
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE, **options)
    handle.samples = order(0)
    return told(lambda: pipeline.train(order(0)))


def test_buffers_above_their_bound_are_told_on_every_rank_with_the_size_needed(pool):
    needed = SAMPLES * 6 * 16 * 4
    for name, text in pool.run(2, too_large, {"most_bytes": needed - 1}):
        assert name == "StateError" and f"needs {needed:,} bytes" in text and f"{needed - 1:,}" in text
    assert pool.run(2, too_large, {"most_bytes": needed}) == [None, None]


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
                if each.opened:
                    told(each.memory.flush)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return said


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_full_disk_is_told_on_every_rank(pool, tmp_path, later):
    for said in pool.run(2, full_disk, str(tmp_path), later):
        first = next(each for each in said if each is not None)
        assert first[0] == "OSError" and "do not fit" in first[1] and "rank 1" in first[1]
        assert said.index(first) in ((2, 3) if later else (0,))  # the thread that writes may be late


def once(epochs):
    handle = trained("GPipe", epochs * SAMPLES // 8, **CHANGE)[2]
    with pytest.warns(UserWarning, match="none again") if epochs == 1 else no_warning():
        handle.remove()
    return True


class no_warning:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("epochs", [1, 2])
def test_traffic_of_first_visits_alone_is_warned_about(pool, epochs):
    assert pool.run(2, once, epochs) == [True, True]


WRONG = {
    "no samples": ({"forward": "change(minmax(bits=4))"}, SpecError, "samples=len"),
    "no size": ({"forward": "change(minmax(4))", "samples": 9, "keep": "topk(0.1)"}, SpecError, "fixed size"),
    "a method": ({"spec": "dgc()"}, SpecError, "ac_sgd"),
    "no codec": ({"forward": "sum()"}, SpecError, "codec"),
    "variance": ({"forward": "change(minmax(bits=1))", "samples": 9}, UserWarning, "leaves 5"),
}


def wrong(options):
    return laconic.pipeline.compress(Pipeline("GPipe").schedule, **options)


@pytest.mark.parametrize("options, kind, words", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_told(pool, options, kind, words):
    with pytest.raises(kind, match=words):
        pool.run(2, wrong, options)


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
