"""The state of a handle on DDP: saved, resumed, resized, or refused because it is another's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import StateError
from tests.dist.nets import loss_of
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, compressed


@on_ranks(2)
def test_a_state_that_belongs_elsewhere_is_refused():
    model, _, handle = compressed("topk(density=0.05)")
    loss_of(model, 0).backward()
    state = handle.state_dict()
    for wrong, words in (
        ({"rank": 7}, "rank"),
        ({"size": 3}, "laconic.resize"),
        ({"spec": "topk(density=0.5)"}, "take that spec"),
        ({"model": "another"}, "another"),
        ({"tensors": {}}, "."),
        ({"tensors": None}, "this is not a state of a handle: its 'tensors' are None"),
        (None, "a state of a handle must be a dictionary, got None"),
        ([state], r"got \[{"),
    ):
        with pytest.raises(StateError, match=words):
            handle.load_state_dict({**state, **wrong} if isinstance(wrong, dict) else wrong)


def state_of_one():
    model, optimizer, handle = compressed("dgc(density=0.05)")
    advance(model, optimizer, 3)
    return handle.state_dict()


def load_resized(states):
    _, _, handle = compressed("dgc(density=0.05)")
    handle.load_state_dict(states[dist.get_rank()])
    return handle.state_dict()["step"]


def test_resize_keeps_the_mean_of_what_was_held(pool):
    states = pool.run(4, state_of_one)
    fewer = laconic.resize(states, 2)
    key = "route0/residual/0.weight"
    held = sum(state["tensors"][f"rank{r}/{key}"] for r, state in enumerate(states)) / 4
    assert held.abs().sum() > 0
    for r, state in enumerate(fewer):
        torch.testing.assert_close(state["tensors"][f"rank{r}/{key}"], held)
    assert pool.run(2, load_resized, fewer) == [3, 3]
    with pytest.raises(StateError, match="all ranks in rank order"):
        laconic.resize(states[1:], 2)
