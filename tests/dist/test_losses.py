"""Ranks that are killed or stopped: the others go on, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.nets import flat
from tests.dist.pool import errors_of
from tests.dist.runs import advance, distributed

STEPS = 8
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
SPECS = [
    "sgp()",
    "sgp(topology=linear())",
    "dpsgd(topology=ring())",
    "osgp(staleness=2)",
    "adpsgd()",
    "choco(topology=ring())",
    "deepsqueeze()",
    "local_sgd(every=3)",
    "slowmo(every=3)",
    "slowmo(every=3, base=sgp())",
    "slowmo(every=3, base=adpsgd())",
    "diloco(every=3, compressor=minmax(bits=8))",
    "lsgd(every=4, local_every=2, ranks_per_node=2)",
    "lsgd(every=4, local_every=2, ranks_per_node=1, count='total')",
    "easgd(every=3)",
    "by_machine(local_sgd(every=2), ranks_per_node=2)",
]


def train_with_a_loss(spec, lost, how, at):
    """All ranks train; `lost` stops or kills itself at step `at` or later. Who lives, and their model."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    model, optimizer = distributed(
        spec, patience_s=5.0 if how == STOPPED else 300.0
    )  # a kill is noticed sooner
    while (step := optimizer.stats().steps) < STEPS or rank == lost:
        if rank == lost and step >= at:  # a regroup may skip a step
            os.kill(os.getpid(), how)
        advance(model, optimizer, [step])
    optimizer.finish()
    living = optimizer.notes()["living"]
    end = flat(model)
    if how == STOPPED and lost not in living and rank == living[0]:
        os.kill(int(store.get(f"pid {lost}")), signal.SIGKILL)
    optimizer.remove()
    return living, end


def check(outcomes, living):
    """As many ranks have an end as should live, and it is the same, and finite."""
    ends = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert [who for who, _ in ends] == [living] * len(living), errors_of(outcomes)
    for _, model in ends:
        assert torch.equal(model, ends[0][1])
        assert bool(model.isfinite().all())


@pytest.mark.parametrize(
    "spec",
    [
        "osgp(staleness=2)",
        "diloco(every=3, compressor=minmax(bits=8))",
        "diloco(every=3, fragments=2, overlap=2, mix=0.5)",
    ],
)
def test_the_others_go_on_when_one_is_killed(pool, spec):
    check(pool.fresh(3, train_with_a_loss, spec, 1, KILLED, 4, timeout_s=90.0), [0, 2])


def test_who_does_not_talk_to_the_lost_one_hears_of_it_too(pool):
    """On a line the last rank waits for a neighbour that has gone to a new group, not for the dead one."""
    check(pool.fresh(4, train_with_a_loss, "sgp(topology=linear())", 0, KILLED, 1, timeout_s=90.0), [1, 2, 3])


def test_a_machine_may_lose_a_rank(pool):
    spec = "lsgd(every=4, local_every=2, ranks_per_node=2)"
    check(pool.fresh(4, train_with_a_loss, spec, 1, KILLED, 3, timeout_s=90.0), [0, 2, 3])


def with_a_test_between(tests_at, killed, slow):
    """All test the group's model after so many steps; `killed` dies while `slow` is not there yet."""
    model, optimizer = distributed("adpsgd()", patience_s=300.0)
    tested = None
    while (step := optimizer.stats().steps) < STEPS:
        if dist.get_rank() == killed and step == tests_at - 2:
            time.sleep(1.5)
            os.kill(os.getpid(), KILLED)
        if dist.get_rank() == slow and step == tests_at - 2:
            time.sleep(2.5)
        advance(model, optimizer, [step])
        if optimizer.stats().steps == tests_at:
            with optimizer.averaged():
                tested = flat(model)
    optimizer.finish()
    living, end = optimizer.notes()["living"], flat(model)
    optimizer.remove()
    return living, end, tested


def test_ranks_that_were_at_different_places_go_on_together(pool):
    outcomes = pool.fresh(4, with_a_test_between, 5, 1, 2, timeout_s=90.0)
    ends = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert [living for living, *_ in ends] == [[0, 2, 3]] * 3, errors_of(outcomes)
    for _, end, tested in ends:
        assert torch.equal(end, ends[0][1])
        assert torch.equal(tested, ends[0][2])


def dies_and_comes_back(spec, lost, at):
    """The first process in the seat of `lost` kills itself; the second does what the others still do.

    The others keep two steps for it, however late it starts.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    lives = store.add(f"lives of {rank}", 1)
    model, optimizer = distributed(spec, patience_s=5.0)
    began = optimizer.stats().steps
    while (step := optimizer.stats().steps) < 30:
        if rank == lost and lives == 1 and step >= at:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(model, optimizer, [step])
        while step == 28 and rank != lost and not store.check([f"back {lost}"]):
            if optimizer.controller.membership.regroup_requested:
                break  # the new process waits for the next step of the others
            time.sleep(0.05)
        if lives == 2 and step == began:
            store.set(f"back {lost}", "")
        time.sleep(0.05)
    optimizer.finish()
    return optimizer.notes()["living"], flat(model), began


@pytest.mark.parametrize(
    "spec", ["sgp()", "adpsgd()", "diloco(every=3)", "by_machine(local_sgd(every=2), ranks_per_node=1)"]
)
def test_a_new_process_takes_the_place_of_one_that_died(pool, spec, monkeypatch):
    """It begins at the others' average and step; at the end all are there, and alike."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    outcomes = pool.fresh(3, dies_and_comes_back, spec, 1, 4, timeout_s=120.0, revive=True)
    assert all(each.error is None for each in outcomes), errors_of(outcomes)
    ends = [each.value for each in outcomes]
    assert [living for living, *_ in ends] == [[0, 1, 2]] * 3
    assert all(torch.equal(model, ends[0][1]) for _, model, _ in ends)
    assert ends[0][2] == ends[2][2] == 0 and ends[1][2] > 4


@pytest.mark.soak
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("how", [KILLED, STOPPED])
def test_every_strategy_outlasts_every_loss(pool, spec, how):
    for lost in range(3):
        outcomes = pool.fresh(4, train_with_a_loss, spec, lost, how, 1 + lost, timeout_s=120.0)
        check(outcomes, [rank for rank in range(4) if rank != lost])
