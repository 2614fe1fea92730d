"""The state of a handle on DDP: saved, resumed, resized, or refused because it is another's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import StateError
from tests.dist.ddp_world import stop_and_go
from tests.dist.nets import SGD, loss_of, net

RESUMED = (
    "topk(density=0.05)",
    "randomk(density=0.1)",
    "dgc(density=0.05, warmup_steps=6)",
    "dgc(density=0.05, warmup_steps=12, warmup=[1.0, 0.3])",  # stops inside the dense part
)


@pytest.mark.parametrize("spec", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


def foreign_states():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "topk(density=0.05)")
    loss_of(model, 0).backward()
    state = handle.state_dict()
    said = []
    for change in (
        {"rank": 7},
        {"size": 3},
        {"spec": "topk(density=0.5)"},
        {"model": "another"},
        {"tensors": {}},
        {"tensors": None},
    ):
        try:
            handle.load_state_dict({**state, **change})
        except StateError as error:
            said.append(str(error))
    for no_state in (None, [state]):
        with pytest.raises(StateError) as caught:
            handle.load_state_dict(no_state)
        said.append(str(caught.value))
    return said


def test_a_state_that_belongs_elsewhere_is_refused(pool):
    for said in pool.run(2, foreign_states):
        assert len(said) == 8
        assert "rank" in said[0] and "laconic.resize" in said[1]
        assert "take that spec" in said[2]
        assert said[5] == "this is no state of a handle: its 'tensors' are None"
        assert said[6] == "a state of a handle is a dictionary, got None" and "got [{" in said[7]


def state_of_one():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return handle.state_dict()


def load_resized(states):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)")
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
