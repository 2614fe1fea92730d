"""What `laconic.compress` refuses on DDP, on every rank, and what a refusal leaves: nothing."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError
from tests.dist.nets import SGD, agree, loss_of, net


def rejected(case):
    rank = dist.get_rank()
    plain = net()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    if case == "not ddp":
        laconic.compress(plain, optimizer, "topk(density=0.1)")
    if case == "unknown":
        laconic.compress(model, optimizer, "topkk(density=0.1)")
    if case == "density":
        laconic.compress(model, optimizer, "topk(density=1.5)")
    if case == "specs differ":
        laconic.compress(model, optimizer, "topk(density=0.1)" if rank else "topk(density=0.2)")
    if case == "one rank fails":
        laconic.compress(model, optimizer, "topk(density=0.1)" if rank else "topk(density=3)")
    if case == "twice":
        laconic.compress(model, optimizer, "topk(density=0.1)")
        laconic.compress(model, optimizer, "topk(density=0.1)")
    if case == "adam":
        laconic.compress(model, torch.optim.Adam(model.parameters()), "dgc(density=0.1)")
    if case == "no optimiser":
        laconic.compress(model, None, "topk(density=0.1)")
    if case == "scheduler":
        laconic.compress(model, torch.optim.lr_scheduler.StepLR(optimizer, 1), "topk(density=0.1)")
    if case == "parameters":
        laconic.compress(model, model.parameters(), "topk(density=0.1)")
    if case == "no seed":
        laconic.compress(model, optimizer, "topk(density=0.1)", seed=None)
    if case == "half a seed":
        laconic.compress(model, optimizer, "topk(density=0.1)", seed=0.5 if rank else 0)
    if case == "foreign optimiser":
        laconic.compress(model, torch.optim.SGD(net().parameters(), lr=0.1), "topk(density=0.1)")
    if case == "other hook":
        model.register_comm_hook(None, lambda state, bucket: bucket)
        laconic.compress(model, optimizer, "topk(density=0.1)")


def attempt(case):
    try:
        rejected(case)
    except LaconicError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("not ddp", AttachError, "wrap it first"),
        ("unknown", SpecError, "did you mean"),
        ("density", SpecError, r"density must be a number in \(0, 1\], got 1.5"),
        ("specs differ", AttachError, "the spec differs"),
        ("twice", AttachError, "compressed already"),
        ("adam", AttachError, "onebit_adam"),
        ("no optimiser", AttachError, "optimizer= takes the torch.optim.Optimizer .*, got NoneType"),
        ("scheduler", AttachError, "got StepLR: give its optimiser"),
        ("parameters", AttachError, "got Parameter: build one over them"),
        ("no seed", SpecError, "seed must be a whole number of 0 or more, below 2.63, got None"),
        ("foreign optimiser", AttachError, "build the optimiser from model.parameters"),
        ("other hook", AttachError, "communication hook already"),
    ],
)
def test_bad_input_is_refused_on_every_rank(pool, case, kind, words):
    for answer in pool.run(2, attempt, case):
        assert answer is not None
        assert answer[0] is kind
        assert re.search(words, answer[1]), answer[1]


def test_an_error_on_one_rank_is_told_to_all(pool):
    first, second = pool.run(2, attempt, "one rank fails")
    assert first[0] is SpecError and "density" in first[1]
    assert second[0] is AttachError and "rank 0 says" in second[1]


def test_a_seed_that_one_rank_has_wrong_is_told_to_all(pool):
    first, second = pool.run(2, attempt, "half a seed")
    assert first[0] is AttachError and "rank 1 says" in first[1]
    assert second[0] is SpecError and "got 0.5" in second[1]


def refused_then_accepted():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for spec in ("topk(density=7)", "nonsense()"):
        try:
            laconic.compress(model, optimizer, spec)
        except SpecError:
            continue
    hooks = len(optimizer._optimizer_step_pre_hooks)
    handle = laconic.compress(model, optimizer, "topk(density=0.1)")
    loss_of(model, 0).backward()
    optimizer.step()
    return hooks, handle.stats().steps, agree(model)


def test_nothing_is_left_half_attached(pool):
    assert pool.run(2, refused_then_accepted) == [(0, 1, True)] * 2


def hooks_and_groups():
    """Five refusals, and what is left of them."""
    model = DistributedDataParallel(net())
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(5):
        try:
            laconic.compress(model, torch.optim.Adam(model.parameters()), "dgc(density=0.1)")
        except AttachError:
            continue
    model.register_comm_hook(None, allow)
    return len(dist.distributed_c10d._world.pg_map) - before


def allow(state, bucket):
    raise AssertionError("no backward pass is made")


def test_a_refusal_leaves_no_hook_and_no_group(pool):
    assert pool.run(2, hooks_and_groups) == [0, 0]


def half_an_optimiser():
    model = DistributedDataParallel(net())
    try:
        laconic.compress(model, torch.optim.Adam(list(model.parameters())[:2]), "onebit_adam()")
    except AttachError as error:
        return str(error)
    return None


def test_adams_momentum_wants_all_parameters(pool):
    assert all("give it all of model.parameters()" in answer for answer in pool.run(2, half_an_optimiser))


def said_at_attach(spec):
    """Warnings of `compress` on this rank, and whether an error from one leaves nothing attached."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            laconic.compress(model, optimizer, spec).remove()
        except (UserWarning, AttachError) as error:
            refused = str(error)
        else:
            refused = ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        laconic.compress(model, optimizer, spec).remove()
    return refused, [(str(each.message), each.filename) for each in said]


def test_a_gather_that_sends_more_than_dense_is_said_at_attach_by_rank_0(pool):
    for rank, (refused, said) in enumerate(pool.run(4, said_at_attach, "gather(dense())")):
        assert "among 4 that is" in refused, "where warnings are errors, no rank attaches"
        assert len(said) == (rank == 0)
        assert all(words in refused and where == __file__ for words, where in said)
    for refused, said in pool.run(4, said_at_attach, "qsgd()"):
        assert not refused and not said
