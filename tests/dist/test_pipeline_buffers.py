"""Buffers of a pipeline after errors, of several handles, of damaged states, and of a handle that is gone."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

import laconic
from laconic.core.errors import StateError
from tests.dist.pipelines import (
    CHANGE,
    SAMPLES,
    TESTED,
    WIDE,
    Pipeline,
    agree_on_sides,
    begun,
    block,
    check_sides,
    data,
    order,
    stepped,
    told,
)  # fmt: skip
from tests.dist.pool import on_ranks

pytestmark = TESTED

BAD = 2  # the step of the second visits in which something goes wrong
MISTAKES = ((order(BAD + 1), "disagree"), ((), "ids"), ([*range(7), SAMPLES], f"got {SAMPLES}"))
KINDS = [(kind, exact) for kind in ("1F1B", "GPipe", "Interleaved1F1B") for exact in (False, True)]


@on_ranks(2, [(*kind, *mistake) for kind in KINDS for mistake in MISTAKES], timeout_s=300)
def test_a_step_that_fails_on_one_side_is_as_if_it_had_not_been(kind, exact, ids, words):
    """Rank 1 names the wrong ids in the third of six steps."""
    pipeline, handle = begun(kind, exact)
    for step in range(6):
        said = stepped(pipeline, handle, order(step), ids if step == BAD and pipeline.rank else None)
        assert (said is not None) == (step == BAD)
        assert said is None or words in said[1]
    stats = handle.stats()
    assert 2 * stats.changes == 3 * stats.first_visits > 0  # in 3 and 2 of 5 steps
    agree_on_sides(handle)


@on_ranks(2)
def test_buffers_that_differ_are_told_at_each_step_until_all_forget():
    """One rank changes a row on its own; then all forget."""
    pipeline, handle = begun("1F1B")
    said = [stepped(pipeline, handle, order(s)) for s in range(3)]
    state = handle.state_dict()
    said.append(stepped(pipeline, handle, order(3)))
    if pipeline.rank == 1:
        state["step"] += 1
        handle.load_state_dict(state)  # the same samples were seen, in the same number of steps
    said += [stepped(pipeline, handle, order(s)) for s in range(4, 6)]
    handle.forget()
    said += [stepped(pipeline, handle, order(s)) for s in range(6, 9)]
    assert [each is not None for each in said] == [False] * 4 + [True] * 2 + [False] * 3
    assert all(each[0] == "WireError" and "handle.forget()" in each[1] for each in said[4:6])
    agree_on_sides(handle)


@on_ranks(2)
def test_after_a_step_that_fails_all_ranks_count_alike():
    """One rank starts a step later than the other: without buffers, forgetting is enough."""
    pipeline, handle = begun()
    said = [stepped(pipeline, handle, order(s)) for s in range(2)]
    if pipeline.rank == 1:
        handle.load_state_dict({**handle.state_dict(buffers=False), "step": 7})
    said.append(stepped(pipeline, handle, order(2)))
    handle.forget()
    said.append(stepped(pipeline, handle, order(3)))
    assert [each is not None for each in said] == [False, False, True, False]
    assert handle.stats().steps == 8


def no_room(folder):
    """Files of rank 1 may not grow from the third step to the sixth; then all forget."""
    pipeline, handle = begun(folder=folder, **CHANGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    try:
        for step in range(6):
            if pipeline.rank == 1 and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            said.append(stepped(pipeline, handle, order(step)))
            for each in handle._changes():
                told(each.buffer.memory.flush)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    handle.forget()
    said += [stepped(pipeline, handle, order(step)) for step in range(6, 10)]
    digests = handle.digests()
    handle.remove()
    return said, digests


def test_a_disk_that_was_full_is_told_at_each_step_until_all_forget(pool, tmp_path):
    found = pool.run(2, no_room, str(tmp_path))
    for said, _ in found:
        assert said[:2] == [None] * 2 and said[6:] == [None] * 4
        for name, text in said[3:6]:
            assert name == "OSError" and "rank 1" in text and "do not fit" in text
            assert "handle.forget()" in text
    check_sides([digests for _, digests in found])
    assert not list(tmp_path.iterdir())


def two_handles(folder):
    """Two pipelines that train by turns with buffers in one folder: the first one's before and after."""
    one, two = Pipeline("GPipe"), Pipeline("GPipe", make=lambda index: block(index + 7))
    handles = [laconic.pipeline.compress(each.schedule, folder=folder, **CHANGE) for each in (one, two)]
    said = [stepped(one, handles[0], order(step)) for step in range(2)]
    before = handles[0].digests()
    said += [stepped(two, handles[1], order(step)) for step in range(2)]
    for each in handles[0]._changes():
        each.buffer.memory.flush()
        each.buffer.memory.prefetch([])  # nothing is at hand: it is read from the file
        each.buffer.memory.flush()
    after = handles[0].digests()
    for handle in handles:
        with pytest.warns(UserWarning, match="none again"):
            handle.remove()
    return said, before == after


def test_two_handles_in_one_folder_do_not_share_files(pool, tmp_path):
    assert pool.run(2, two_handles, str(tmp_path)) == [([None] * 4, True)] * 2
    assert not list(tmp_path.iterdir())


class Wide(nn.Module):
    """Stages between which twice as much crosses."""

    def __init__(self, index):
        super().__init__()
        self.inner, self.index = block(index), index

    def forward(self, x):
        return torch.cat([self.inner(x)] * 2, -1) if self.index == 0 else self.inner(x[..., :WIDE])


def damaged(state):
    """Copies of a state, each with another damage."""
    tensors = state["tensors"]
    rows = next(key for key in tensors if key.endswith("/rows"))
    seen = rows.replace("/rows", "/seen")
    others = {
        "fewer rows": {rows: tensors[rows][:3]},
        "shorter rows": {rows: tensors[rows][:, :-1]},
        "rows of floats": {rows: tensors[rows].float()},
        "rows are no table": {rows: tensors[rows].flatten()},
        "fewer samples": {seen: tensors[seen][:-1]},
        "numbers for flags": {seen: tensors[seen].long()},
        "a version of one byte": {rows.replace("/rows", "/version"): torch.zeros(1, dtype=torch.uint8)},
    }
    found = {how: {**state, "tensors": {**tensors, **other}} for how, other in others.items()}
    elsewhere = {key.replace("0>1", "4>5"): value for key, value in tensors.items()}
    return found | {
        "no tensors": {key: value for key, value in state.items() if key != "tensors"},
        "no step": {key: value for key, value in state.items() if key != "step"},
        "tensors are no table": {**state, "tensors": [1]},
        "step is no number": {**state, "step": "three"},
        "no rows": {**state, "tensors": {key: value for key, value in tensors.items() if key != rows}},
        "another boundary": {**state, "tensors": elsewhere},
    }


def widths(handle):
    return {each.shape[1] for key, each in handle.state_dict()["tensors"].items() if "rows" in key}


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_with_nothing_changed():
    wide, other = begun(make=Wide)
    stepped(wide, other, order(0))
    pipeline, handle = begun()
    said = [stepped(pipeline, handle, order(0))]
    older = handle.state_dict()
    said += [stepped(pipeline, handle, order(step)) for step in range(1, 4)]
    before = handle.digests(), handle.stats().steps
    for how, state in {"another width": other.state_dict(), **damaged(older)}.items():
        with pytest.raises(StateError):
            handle.load_state_dict(state)
            raise AssertionError(how)
    assert before == (handle.digests(), handle.stats().steps)
    said += [stepped(pipeline, handle, order(step)) for step in range(4, 6)]
    assert said == [None] * 6 and widths(handle) == {6 * WIDE * 4}
    agree_on_sides(handle)


@on_ranks(2)
def test_a_saved_buffer_of_another_width_is_told_once_and_dropped():
    """A new pipeline hears of it when something first crosses, and goes on without."""
    wide, other = begun(make=Wide)
    stepped(wide, other, order(0))
    pipeline, handle = begun()
    handle.load_state_dict(other.state_dict())
    first, *others = [stepped(pipeline, handle, order(step)) for step in range(3)]
    assert first[0] == "StateError" and "handle.forget()" in first[1] and others == [None] * 2
    assert widths(handle) == {6 * WIDE * 4}
    agree_on_sides(handle)


def after_remove():
    """What each use of a handle says once it is removed; and its figures."""
    pipeline, handle = begun()
    said = [stepped(pipeline, handle, order(step)) for step in range(4)]
    state = handle.state_dict()
    handle.remove()
    handle.remove()
    x, target = data()
    args = [x[:8]] if pipeline.first else []
    kwargs = {"target": target[:8]} if pipeline.last else {}
    uses = [
        handle.state_dict,
        lambda: handle.load_state_dict(state),
        lambda: handle.step(*args, samples=order(0), **kwargs),
        lambda: setattr(handle, "samples", order(0)),
        handle.digests,
        handle.forget,
    ]
    return said, [told(use) for use in uses], handle.stats().steps, pipeline.train(order(0)) is not None


def test_a_handle_that_was_removed_says_so(pool):
    for rank, (said, refused, steps, trained) in enumerate(pool.run(2, after_remove)):
        assert said == [None] * 4 and steps == 4
        assert all(each[0] == "AttachError" and "removed" in each[1] for each in refused)
        assert trained == (rank == 1)  # torch's own pipeline, on its own
