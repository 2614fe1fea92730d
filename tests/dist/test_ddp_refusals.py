"""What `laconic.compress` refuses on DDP, on every rank, and what a refusal leaves: nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError
from tests.dist.nets import SGD, agree, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance

TOPK = "topk(density=0.1)"
SEED = "seed must be a whole number of 0 or more, below 2.63, got"


def calls(model, optimizer):
    """Calls of `compress`; and for rank 0 and 1 the class and words of the error."""
    rank, compress = dist.get_rank(), laconic.compress
    foreign = torch.optim.SGD(net().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    got = "optimizer= takes the torch.optim.Optimizer .*, got"
    both = [
        (lambda: compress(model.module, optimizer, TOPK), AttachError, "wrap it first"),
        (lambda: compress(model, optimizer, "topkk(density=0.1)"), SpecError, "did you mean"),
        (
            lambda: compress(model, optimizer, "topk(density=1.5)"),
            SpecError,
            r"density must be a number in \(0, 1\], got 1.5",
        ),
        (lambda: compress(model, optimizer, f"topk(density=0.{rank + 1})"), AttachError, "the spec differs"),
        (
            lambda: compress(model, torch.optim.Adam(model.parameters()), "signum()"),
            AttachError,
            "onebit_adam",
        ),
        (
            lambda: compress(model, torch.optim.Adam([*model.parameters()][:2]), "onebit_adam()"),
            AttachError,
            r"give it all of model.parameters\(\)",
        ),
        (lambda: compress(model, None, TOPK), AttachError, f"{got} NoneType"),
        (lambda: compress(model, schedule, TOPK), AttachError, "got StepLR: give its optimiser"),
        (
            lambda: compress(model, model.parameters(), TOPK),
            AttachError,
            "got Parameter: build one over them",
        ),
        (lambda: compress(model, optimizer, TOPK, seed=None), SpecError, f"{SEED} None"),
        (lambda: compress(model, foreign, TOPK), AttachError, "build the optimiser from model.parameters"),
    ]
    return [(call, (kind, words), (kind, words)) for call, kind, words in both] + [
        (
            lambda: compress(model, optimizer, TOPK if rank else "topk(density=3)"),
            (SpecError, "density"),
            (AttachError, "rank 0 says"),
        ),
        (
            lambda: compress(model, optimizer, TOPK, seed=0.5 if rank else 0),
            (AttachError, "rank 1 says"),
            (SpecError, "got 0.5"),
        ),
    ]


@on_ranks(2)
def test_bad_input_is_refused_on_every_rank_and_nothing_is_left_of_it():
    """No hook and no group; and what one rank alone has wrong is told to all."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    groups = len(dist.distributed_c10d._world.pg_map)
    for call, *errors in calls(model, optimizer):
        kind, words = errors[dist.get_rank()]
        with pytest.raises(LaconicError, match=words) as caught:
            call()
        assert caught.type is kind, words
    assert not optimizer._optimizer_step_pre_hooks
    assert len(dist.distributed_c10d._world.pg_map) == groups
    handle = laconic.compress(model, optimizer, TOPK)
    with pytest.raises(AttachError, match="compressed already"):
        laconic.compress(model, optimizer, TOPK)
    advance(model, optimizer, 1)
    assert handle.stats().steps == 1 and agree(model)
    handle.remove()
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, lambda state, bucket: bucket)
    with pytest.raises(AttachError, match="communication hook already"):
        laconic.compress(hooked, torch.optim.SGD(hooked.parameters(), **SGD), TOPK)


def allow(state, bucket):
    raise AssertionError("no backward pass is made")


@on_ranks(2)
def test_after_a_refusal_ddp_takes_another_hook():
    model = DistributedDataParallel(net())
    with pytest.raises(AttachError):
        laconic.compress(model, torch.optim.Adam(model.parameters()), "signum()")
    model.register_comm_hook(None, allow)


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
