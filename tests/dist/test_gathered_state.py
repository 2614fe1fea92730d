"""Checkpoints that rank 0 alone writes: with the memory of all ranks, or with a warning."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import StateError
from tests.dist.nets import SGD, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, compressed

DGC = "dgc(density=0.05)"


def from_rank_0(folder, saved):
    """A state that rank 0 alone has written, as each rank finds it."""
    if dist.get_rank() == 0:
        torch.save(saved, folder / "rank0.pt")
    dist.barrier()
    return torch.load(folder / "rank0.pt", weights_only=True)


def written_by_rank_0(folder):
    """Ten steps; and four, then six from a file of rank 0."""
    whole = compressed(DGC)
    advance(*whole[:2], range(10))
    model, optimizer, handle = compressed(DGC)
    advance(model, optimizer, range(4))
    state = handle.state_dict(gather=True)
    saved = from_rank_0(folder, [model.module.state_dict(), optimizer.state_dict(), state])
    model, optimizer, handle = compressed(DGC)
    for part, its in zip((model.module, optimizer, handle), saved, strict=True):
        part.load_state_dict(its)
    advance(model, optimizer, range(4, 10))
    return torch.equal(flat(whole[0]), flat(model)), len(state["ranks"])


def test_a_run_goes_on_from_what_rank_0_wrote(pool, tmp_path):
    (same, held), (other_same, other_held) = pool.run(2, written_by_rank_0, tmp_path)
    assert same and other_same
    assert (held, other_held) == (2, 0)


def distributed(spec):
    model = net()
    adam = "adam" in spec
    plain = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = plain(model.parameters(), **({"lr": 0.01} if adam else SGD))
    return laconic.distribute(model, optimizer, spec)


def distributed_from_rank_0(folder, spec):
    """Four steps, and six more; or those from a file of rank 0. Also how many states that holds of each."""
    first = distributed(spec)
    advance(*first, range(4))
    state = first[1].state_dict(gather=True)
    saved = from_rank_0(folder, {"model": first[0].state_dict(), "optimizer": state})
    model, optimizer = distributed(spec)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for each in (first, (model, optimizer)):
        advance(*each, range(4, 10))
    same = torch.equal(flat(first[0]), flat(model))
    held = len(state["laconic"]["ranks"]), len(state["optimizers"])
    resized = len(laconic.resize(saved["optimizer"]["laconic"], 3))
    for each in (optimizer, first[1]):
        each.remove()
    return same, held, resized


@pytest.mark.parametrize(
    ("spec", "optimisers"),
    [
        ("dgc(density=0.05)", 1),
        ("zero_one_adam(2, kappa=1, double_every=2, longest=3)", 2),
        ("osgp()", 2),
        ("local_sgd(every=3)", 2),
    ],
)
def test_a_distributed_run_goes_on_from_what_rank_0_wrote(pool, tmp_path, spec, optimisers):
    assert pool.run(2, distributed_from_rank_0, tmp_path, spec) == [
        (True, (2, optimisers), 3),
        (True, (0, 0), 3),
    ]


@on_ranks(2, ["dgc()", "sgp()"])
def test_an_empty_gathered_state_says_which_file_to_load(spec):
    _model, optimizer = distributed(spec)
    state = optimizer.state_dict(gather=True)
    empty = {**state, "laconic": {**state["laconic"], "ranks": []}}
    with pytest.raises(StateError) as caught:
        optimizer.load_state_dict(empty)
    optimizer.remove()
    said = str(caught.value)
    assert "load that file on every rank" in said


@on_ranks(2, [("topk(density=0.1)", False, True), ("topk(density=0.1)", True, False), ("sgp()", True, False)])
def test_discarded_gradients_do_not_come_back(spec, discarded, moves):
    model = net()
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    if discarded:
        optimizer.discard()
    before = flat(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (0.0 * loss_of(model, 1)).backward()
        optimizer.step()
    moved = bool((flat(model) != before).any())
    optimizer.remove()
    assert moved == moves


@on_ranks(2)
def test_a_checkpoint_does_not_count_as_training():
    _model, _, handle = compressed(DGC)  # the group goes with the model
    before = handle.stats().network_sent
    handle.state_dict(gather=True)
    assert handle.stats().network_sent - before == 0


@on_ranks(2)
def test_what_cannot_be_loaded_says_how_to_save():
    _model, _, handle = compressed(DGC)  # the group goes with the model
    state, own = handle.state_dict(gather=True), handle.state_dict()
    other = {**own, "rank": 1 - own["rank"]}
    said = []
    for wrong in ({**state, "ranks": []}, {**state, "ranks": [own] * 3}, other):
        with pytest.raises(StateError) as caught:
            handle.load_state_dict(wrong)
        said.append(str(caught.value))
    empty, three, other = said
    assert "load that file on every rank" in empty
    assert "3 ranks" in three and "laconic.resize" in three
    assert "gather=True" in other


def warned_when(savers, spec, how_often=1):
    """Warnings of the steps after these ranks have saved their own state."""
    model, optimizer, handle = compressed(spec)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            advance(model, optimizer, [step])
            if dist.get_rank() in savers:
                for _ in range(how_often):
                    torch.save(handle.state_dict(), io.BytesIO())
    return [str(each.message) for each in said if "saved its memory" in str(each.message)]


def test_a_rank_that_saves_alone_is_warned_once(pool):
    mine, others = pool.run(2, warned_when, [0], "topk(density=0.1)")
    assert len(mine) == 1 and "gather=True" in mine[0]
    assert others == []


@pytest.mark.parametrize(
    ("savers", "spec", "how_often"),
    [([0, 1], "topk(density=0.1)", 2), ([0], "fp16()", 1)],
    ids=["all save", "nothing is kept"],
)
def test_nobody_is_warned_in_vain(pool, savers, spec, how_often):
    assert pool.run(2, warned_when, savers, spec, how_often) == [[], []]


def test_gathered_states_are_resized(pool):
    states = pool.run(2, gathered)[0]
    fewer = laconic.resize(states, 1)
    key = "route0/residual/0.weight"
    held = sum(each["tensors"][f"rank{rank}/{key}"] for rank, each in enumerate(states["ranks"])) / 2
    torch.testing.assert_close(fewer[0]["tensors"][f"rank0/{key}"], held)


def gathered():
    model, optimizer, handle = compressed(DGC)
    advance(model, optimizer, range(2))
    return handle.state_dict(gather=True)
