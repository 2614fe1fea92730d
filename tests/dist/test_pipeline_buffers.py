"""Buffers of a pipeline after errors, of several handles, of damaged states, and of a handle that is gone."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

import laconic
from tests.dist.pipelines import (
    SAMPLES,
    TESTED,
    WIDE,
    Pipeline,
    block,
    check_sides,
    compressed,
    data,
    order,
    told,
)

pytestmark = TESTED

CHANGE = {"forward": "change(minmax(bits=4))", "samples": SAMPLES}


def stepped(pipeline, handle, ids, given=None):
    """What a step on these samples says; `given`: the ids that this rank names."""
    handle.samples = ids if given is None else given
    return told(lambda: pipeline.train(ids))


BAD = 2  # the step of the second visits in which something goes wrong
MISTAKES = {
    "other ids": (order(BAD + 1), "disagree"),
    "no ids": ((), "ids"),
    "an id too large": ([*range(7), SAMPLES], f"got {SAMPLES}"),
}


def mistaken(kind, each, exact):
    """Six steps, in the third of which rank 1 names the wrong ids: what they say, and both sides after."""
    found = []
    for ids in each:
        pipeline = Pipeline(kind)
        handle = compressed(pipeline, CHANGE, exact)
        said = [
            stepped(pipeline, handle, order(s), ids if s == BAD and pipeline.rank else None) for s in range(6)
        ]
        found.append((said, handle.digests(), handle.stats()))
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("kind", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_a_step_that_fails_on_one_side_is_as_if_it_had_not_been(pool, kind, exact):
    everywhere = pool.run(2, mistaken, kind, [ids for ids, _ in MISTAKES.values()], exact)
    for (_, words), found in zip(MISTAKES.values(), zip(*everywhere, strict=True), strict=True):
        for said, _, stats in found:
            assert [each is not None for each in said] == [step == BAD for step in range(6)]
            assert words in said[BAD][1]
            assert 2 * stats.changes == 3 * stats.first_visits > 0  # in 3 and 2 of 5 steps
        check_sides([digests for _, digests, _ in found])


def diverged():
    """One rank changes a row on its own; then all forget."""
    pipeline = Pipeline("1F1B")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = [stepped(pipeline, handle, order(s)) for s in range(3)]
    state = handle.state_dict()
    said.append(stepped(pipeline, handle, order(3)))
    if pipeline.rank == 1:
        state["step"] += 1
        handle.load_state_dict(state)  # the same samples were seen, in the same number of steps
    said += [stepped(pipeline, handle, order(s)) for s in range(4, 6)]
    handle.forget()
    said += [stepped(pipeline, handle, order(s)) for s in range(6, 9)]
    return said, handle.digests()


def test_buffers_that_differ_are_told_at_each_step_until_all_forget(pool):
    found = pool.run(2, diverged)
    for said, _ in found:
        assert [each is not None for each in said] == [False] * 4 + [True] * 2 + [False] * 3
        assert all(each[0] == "WireError" and "handle.forget()" in each[1] for each in said[4:6])
    check_sides([digests for _, digests in found])


def one_behind():
    """One rank starts a step later than the other: without buffers, forgetting is enough."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = [stepped(pipeline, handle, order(s)) for s in range(2)]
    if pipeline.rank == 1:
        handle.load_state_dict({**handle.state_dict(buffers=False), "step": 7})
    said.append(stepped(pipeline, handle, order(2)))
    handle.forget()
    return [*said, stepped(pipeline, handle, order(3))], handle.stats().steps


def test_after_a_step_that_fails_all_ranks_count_alike(pool):
    for said, steps in pool.run(2, one_behind):
        assert [each is not None for each in said] == [False, False, True, False]
        assert steps == 8


def no_room(folder):
    """Files of rank 1 may not grow from the third step to the sixth; then all forget."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, folder=folder, **CHANGE)
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


def spoil(state, how):
    """A copy of a state, damaged."""
    tensors = dict(state["tensors"])
    rows = next(key for key in tensors if key.endswith("/rows"))
    seen = rows.replace("/rows", "/seen")
    if how == "no tensors":
        return {key: value for key, value in state.items() if key != "tensors"}
    if how == "no step":
        return {key: value for key, value in state.items() if key != "step"}
    if how == "tensors are no table":
        return {**state, "tensors": [1]}
    if how == "step is no number":
        return {**state, "step": "three"}
    if how == "fewer rows":
        tensors[rows] = tensors[rows][:3]
    if how == "shorter rows":
        tensors[rows] = tensors[rows][:, :-1]
    if how == "rows of floats":
        tensors[rows] = tensors[rows].float()
    if how == "rows are no table":
        tensors[rows] = tensors[rows].flatten()
    if how == "no rows":
        del tensors[rows]
    if how == "fewer samples":
        tensors[seen] = tensors[seen][:-1]
    if how == "numbers for flags":
        tensors[seen] = tensors[seen].long()
    if how == "another boundary":
        tensors = {key.replace("0>1", "4>5"): value for key, value in tensors.items()}
    if how == "a version of one byte":
        tensors[rows.replace("/rows", "/version")] = torch.zeros(1, dtype=torch.uint8)
    return {**state, "tensors": tensors}


DAMAGE = (
    "no tensors", "no step", "tensors are no table", "step is no number", "fewer rows", "shorter rows",
    "rows of floats", "rows are no table", "no rows", "fewer samples", "numbers for flags",
    "another boundary", "a version of one byte",
)  # fmt: skip


def loads():
    """What states that do not fit say, and whether the handle is what it was."""
    wide = Pipeline("GPipe", make=Wide)
    other = laconic.pipeline.compress(wide.schedule, **CHANGE)
    stepped(wide, other, order(0))
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    said = [stepped(pipeline, handle, order(0))]
    older = handle.state_dict()
    said += [stepped(pipeline, handle, order(step)) for step in range(1, 4)]
    states = {"another width": other.state_dict()} | {how: spoil(older, how) for how in DAMAGE}
    before = handle.digests(), handle.stats().steps
    refused = {how: told(lambda state=state: handle.load_state_dict(state)) for how, state in states.items()}
    same = before == (handle.digests(), handle.stats().steps)
    said += [stepped(pipeline, handle, order(step)) for step in range(4, 6)]
    widths = {each.shape[1] for key, each in handle.state_dict()["tensors"].items() if "rows" in key}
    return said, refused, same, widths, handle.digests()


def test_a_state_that_does_not_fit_is_refused_with_nothing_changed(pool):
    found = pool.run(2, loads)
    for said, refused, same, widths, _ in found:
        assert said == [None] * 6 and same
        assert {how: each and each[0] for how, each in refused.items()} == dict.fromkeys(
            refused, "StateError"
        )
        assert widths == {6 * WIDE * 4}
    check_sides([digests for *_, digests in found])


def loaded_before_it_crosses():
    """A new pipeline hears of a state of another width when something first crosses, and goes on without."""
    wide = Pipeline("GPipe", make=Wide)
    other = laconic.pipeline.compress(wide.schedule, **CHANGE)
    stepped(wide, other, order(0))
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
    handle.load_state_dict(other.state_dict())
    said = [stepped(pipeline, handle, order(step)) for step in range(3)]
    widths = {each.shape[1] for key, each in handle.state_dict()["tensors"].items() if "rows" in key}
    return said, widths, handle.digests()


def test_a_saved_buffer_of_another_width_is_told_once_and_dropped(pool):
    found = pool.run(2, loaded_before_it_crosses)
    for said, widths, _ in found:
        assert said[0][0] == "StateError" and "handle.forget()" in said[0][1]
        assert said[1:] == [None] * 2
        assert widths == {6 * WIDE * 4}
    check_sides([digests for *_, digests in found])


def after_remove():
    """What each use of a handle says once it is removed; and its figures."""
    pipeline = Pipeline("GPipe")
    handle = laconic.pipeline.compress(pipeline.schedule, **CHANGE)
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
