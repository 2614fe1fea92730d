"""Ranks that have different numbers of steps left: one that is done waits, and holds nobody up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from laconic.core.errors import PeerError
from laconic.strategies.membership import generations
from laconic.strategies.strategy import Strategy
from tests.dist.nets import agree, flat
from tests.dist.pool import errors_of
from tests.dist.runs import advance, distributed
from tests.laws.strategy_ranks import fits
from tests.laws.table import specs

DETECTED_S = 30.0  # until every rank knows that another will not make the same call
PATIENCE_S = 30.0  # a rank that waits for one that is done would run into it
FEW = {
    2: ["sgp()", "lpdt()"],
    3: ["adpsgd()", "diloco(every=4, overlap=3)", "easgd(every=2)"],
    4: [
        "dpsgd(bipartite_exponential())",  # three ranks do not fit: each of them trains alone
        "lsgd(every=8, local_every=4, ranks_per_node=2, count='total')",
    ],
}


def late_steps_allowed():
    """Ranks that are done wait for a late step of another, as on a busy machine, before they leave."""
    return mock.patch.object(generations, "STILL_S", 15.0)


def ends(spec, counts):
    """Take this rank's number of steps, finish, and go on together.

    Returns the seconds until all have finished, the regroups until then and at the end, whether ranks agree,
    and who is left.
    """
    start = time.monotonic()
    model, optimizer = distributed(spec, patience_s=PATIENCE_S)
    with late_steps_allowed() if len({*counts}) == 1 else contextlib.nullcontext():
        advance(model, optimizer, counts[dist.get_rank()])
        optimizer.finish()
    seconds, same = time.monotonic() - start, agree(model)
    membership, steps = optimizer.controller.membership, optimizer.stats().steps
    regroups = membership.generation
    with late_steps_allowed():
        advance(model, optimizer, range(steps, steps + 3))  # as many on every rank: all need each other again
        optimizer.finish()
    same = same and agree(model)
    found = seconds, regroups, membership.generation, same, optimizer.notes()["living"]
    optimizer.remove()
    return found


def check(pool, size, cases, timeout_s):
    for (spec, counts), found in pool.each(size, ends, cases, timeout_s=timeout_s):
        for rank, (seconds, regroups, in_all, same, living) in enumerate(found):
            case = f"{spec}, steps {counts}, rank {rank}: {found[rank]}"
            assert same and living == [*range(size)], case
            assert seconds < PATIENCE_S + 0.05 * max(counts), case
            assert regroups <= size, case  # one as each rank but the last leaves, and the last, of all
            assert in_all == regroups, f"{case}: ranks at one step formed another group"


def test_ranks_with_steps_left_go_on_without_those_that_are_done(pool):
    counts = {2: (5, 50), 3: (50, 5, 20), 4: (20, 20, 5, 20)}
    for size, some in FEW.items():
        check(pool, size, [(spec, counts[size]) for spec in some], timeout_s=240.0)


def test_ranks_that_end_together_form_no_group(pool):
    specs = ["sgp()", "osgp(staleness=2)", "adpsgd()", "diloco(every=4, overlap=3)"]
    check_equal = [(spec, (6, 6)) for spec in specs]
    for (spec, _), found in pool.each(2, ends, check_equal, timeout_s=120.0):
        assert [(regroups, in_all, same) for _, regroups, in_all, same, _ in found] == 2 * [(0, 0, True)], (
            spec
        )


def ends_without_a_rank(lost):
    """Rank 0 is done early, rank 1 later; `lost` dies while rank 0 waits."""
    model, optimizer = distributed("sgp()", patience_s=PATIENCE_S)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    finishers, kills = optimizer.controller.membership.heartbeats.finishers, lost == 0 and rank == 1
    start = time.monotonic()
    for step in range(5 if rank == 0 else 60):
        while kills and step == 59 and 0 not in finishers.places():
            time.sleep(0.05)  # rank 0 is late
        if kills and step >= 10 and 0 in finishers.places():
            kills = False
            os.kill(int(store.get("pid 0")), signal.SIGKILL)
        advance(model, optimizer, [step])
        time.sleep(0.1)
        if rank == lost == 1 and step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.finish()
    return time.monotonic() - start, optimizer.notes()["living"], flat(model)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_before_all_are_done_is_left_out(pool, lost):
    """Either the rank that waits in `finish()`, or the one that still trains."""
    outcomes = pool.fresh(3, ends_without_a_rank, lost, timeout_s=100.0)
    left = [rank for rank in range(3) if rank != lost]
    found = [each.value for each in outcomes if each.error is None]
    assert [living for _, living, _ in found] == [left] * 2, errors_of(outcomes)
    (one_s, _, one), (other_s, _, other) = found
    assert torch.equal(one, other) and max(one_s, other_s) < PATIENCE_S


def comes_back_while_the_other_waits():
    """Rank 0 is done early. The first process of rank 1 dies, and the second takes the remaining steps."""
    store = dist.distributed_c10d._get_default_store()
    lives = store.add(f"lives of {dist.get_rank()}", 1)
    model, optimizer = distributed("sgp()", patience_s=PATIENCE_S)
    while (step := optimizer.stats().steps) < (5 if dist.get_rank() == 0 else 20):
        if dist.get_rank() == 1 and lives == 1 and step >= 10:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(model, optimizer, [step])
    optimizer.finish()
    return optimizer.notes()["living"], optimizer.stats().steps, flat(model)


@pytest.mark.nightly
def test_a_new_process_takes_the_place_of_one_that_died_before_the_end(pool, monkeypatch):
    """It loads the model of the rank that waits; if it is late, that rank has ended alone."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    first, second = pool.fresh(2, comes_back_while_the_other_waits, timeout_s=60.0, revive=True)
    assert first.error is None, first.error
    if second.error is None:
        assert first.value[0] == second.value[0] == [0, 1] and torch.equal(first.value[2], second.value[2])
    else:
        assert isinstance(second.error, PeerError) and first.value[0] == [0], second.error


def ends_without_patience(spec, counts):
    """The seconds, the error if any, and the model."""
    model, optimizer = distributed(spec)
    start, text = time.monotonic(), ""
    try:
        advance(model, optimizer, counts[dist.get_rank()])
        optimizer.finish()
    except PeerError as error:
        text = str(error)
    found = time.monotonic() - start, text, flat(model)
    with contextlib.suppress(PeerError):
        optimizer.remove()
    dist.barrier()
    return found


def check_without_patience(pool, size, cases, timeout_s):
    """Either no rank needed another after it was done, or every rank names the call and the rank."""
    for (spec, counts), found in pool.each(size, ends_without_patience, cases, timeout_s=timeout_s):
        case = f"{spec}, steps {counts}: {[each[:2] for each in found]}"
        assert all(seconds < DETECTED_S + 0.05 * max(counts) for seconds, *_ in found), case
        if any(text for _, text, _ in found):
            assert all(re.search(r"rank \d is in finish\(\)", text) for _, text, _ in found), case
        else:
            assert all(torch.equal(found[0][2], model) for *_, model in found), case


def test_without_patience_every_rank_soon_names_the_rank_that_is_done(pool):
    cases = [("sgp()", (5, 50)), ("osgp()", (5, 50)), ("local_sgd(every=2)", (50, 5))]
    check_without_patience(pool, 2, [*cases, ("diloco(every=100)", (5, 50))], timeout_s=120.0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_strategy_ends_at_any_step(pool, size):
    counts = {2: [(5, 50), (500, 5)], 3: [(5, 50, 500), (500, 50, 5)], 4: [(50, 5, 500, 500)]}[size]
    fitting = [spec for spec in specs(Strategy) if fits(spec, size)]
    check(pool, size, [(spec, each) for spec in fitting for each in counts], timeout_s=3000.0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_strategy_without_patience_ends_or_names_the_rank_that_is_done(pool, size):
    counts = {2: (500, 5), 3: (5, 50, 500), 4: (50, 5, 500, 500)}[size]
    fitting = [spec for spec in specs(Strategy) if fits(spec, size)]
    check_without_patience(pool, size, [(spec, counts) for spec in fitting], timeout_s=3000.0)


def stopped(spec):
    """Rank 1 is stopped for 4 s, twice the patience, and then takes all its own steps."""
    model, optimizer = distributed(spec, patience_s=2.0)
    start = time.monotonic()
    for step in range(100):
        if dist.get_rank() == 1 and step == 20:
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        advance(model, optimizer, [step])
        time.sleep(0.05)
    optimizer.finish()
    return time.monotonic() - start, optimizer.controller.membership.generation, flat(model)


@pytest.mark.nightly
def test_a_rank_that_rejoins_behind_the_others_ends_soon_after_them(pool):
    """One regroup without it, one with it, one without the rank that is done, and the last."""
    for spec in ("lpdt()", "local_sgd(every=4)"):
        (first_s, regroups, first), (second_s, _, second) = pool.run(2, stopped, spec, timeout_s=100.0)
        assert regroups <= 4 and max(first_s, second_s) < 40.0, (spec, regroups, first_s, second_s)
        assert torch.equal(first, second), spec
