"""Ranks that stop, hang or begin late: the others go on, and the sleeper rejoins, or ends with an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import AttachError, PeerError
from laconic.strategies.strategy import Strategy
from tests.dist.nets import flat, net
from tests.dist.pool import errors_of
from tests.dist.runs import advance, distributed
from tests.laws.strategy_ranks import fits
from tests.laws.table import specs

KILLED, STOPPED, HUNG, SHORT = "killed", "stopped", "hung", "stopped for a short time"
PATIENCE_S, SHORT_S = 3.0, 0.5
STEPS, AFTER = 12, 6  # in all if nobody comes back; once the sleeper is back
FOREVER = timedelta(seconds=100)


def begin(spec, **options):
    """The distributed, this rank, and the store in which its process id is."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    return *distributed(spec, patience_s=PATIENCE_S, **options), rank, store


def train(model, optimizer, step):
    advance(model, optimizer, [step])
    time.sleep(0.02)


def stand_still(fault, rank, store):
    """What happens to the lost rank."""
    if fault == HUNG:
        store.wait(["awake"], FOREVER)  # its heartbeat goes on
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault == KILLED else signal.SIGSTOP)


def wake(fault, store, lost):
    if fault == HUNG:
        store.set("awake", "")
    else:
        os.kill(int(store.get(f"pid {lost}")), signal.SIGCONT)


def wake_later(pid):
    """Let a process be stopped for a short time, however late it stops."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(SHORT_S)
    os.kill(pid, signal.SIGCONT)


def outlasts(spec, fault, lost):
    """All train; `lost` stands still before a step. The living, this rank's end, and whether it was alone."""
    model, optimizer, rank, store = begin(spec)
    waker, gone, fallen = (lost + 1) % dist.get_world_size(), False, False
    comes_back = fault in (STOPPED, HUNG)
    end = None if comes_back else STEPS
    while (step := optimizer.stats().steps) != end and step < 3000:
        if step >= 3 and not fallen:
            fallen = True
            if rank == lost:
                stand_still(fault, rank, store)
                gone = True
            elif rank == waker and fault == SHORT:
                threading.Thread(target=wake_later, args=(int(store.get(f"pid {lost}")),)).start()
        train(model, optimizer, step)
        living = optimizer.notes()["living"]
        if lost not in living and not gone:
            gone = True
            if rank == waker and comes_back:
                wake(fault, store, lost)
        if gone and lost in living and end is None:
            end = optimizer.stats().steps + AFTER  # the same on all: they left that regroup together
    optimizer.finish()
    found = optimizer.notes()["living"], flat(model), optimizer.stats().steps
    optimizer.remove()
    return found


def check(outcomes, left):
    """So many end, with the same model, at the same step."""
    assert [each.rank for each in outcomes if each.error is None] == left, errors_of(outcomes)
    ends = [each.value for each in outcomes if each.error is None]
    for living, model, steps in ends:
        assert living == left and steps == ends[0][2]
        assert torch.equal(model, ends[0][1]) and bool(model.isfinite().all())


def outlast(pool, spec, size, fault, lost):
    outcomes = pool.fresh(size, outlasts, spec, fault, lost, timeout_s=100.0)
    check(outcomes, [rank for rank in range(size) if fault != KILLED or rank != lost])


def test_a_rank_that_died_unheard_is_noticed_at_the_end(pool):
    outlast(pool, "easgd(every=16)", 3, KILLED, 0)  # it exchanges nothing in so few steps


@pytest.mark.parametrize(
    ("spec", "size", "fault"),
    [
        ("sgp()", 3, STOPPED),
        ("diloco(every=2)", 2, HUNG),
        ("by_machine(local_sgd(every=2), ranks_per_node=1)", 3, SHORT),
    ],
)
def test_who_stood_still_comes_back(pool, spec, size, fault):
    """A rank that hangs goes on beating. Two ranks: the one that is left trains alone meanwhile."""
    outlast(pool, spec, size, fault, lost=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", [KILLED, STOPPED, HUNG, SHORT])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("spec", specs(Strategy))
def test_every_strategy_outlasts_every_standstill(pool, spec, size, fault, repeats):
    if not fits(spec, size) or (fault != SHORT and size > 2 and not fits(spec, size - 1)):
        pytest.skip("does not fit the number of ranks, or of those that are left")
    if fault == HUNG and "adpsgd" in spec:
        pytest.skip("nobody waits for a rank, so nobody notices that it hangs before all finish")
    for seed in range(repeats or 10):
        outlast(pool, spec, size, fault, seed % size)


def sleeps_to_the_end():
    """Rank 1 hangs until the others have ended their training."""
    model, optimizer, rank, store = begin("local_sgd(every=2)", quorum=2)
    while (step := optimizer.stats().steps) < STEPS:
        if rank == 1 and step >= 3:  # a regroup may skip a step
            store.wait(["ended 0", "ended 2"], FOREVER)
        train(model, optimizer, step)
    optimizer.finish()
    optimizer.remove()
    store.set(f"ended {rank}", "")


def test_who_wakes_up_after_the_end_ends_with_an_error(pool):
    first, late, last = pool.fresh(3, sleeps_to_the_end, timeout_s=100.0)
    assert first.error is None and last.error is None, (first.error, last.error)
    assert isinstance(late.error, PeerError)
    assert "the others continued without it as ranks [0, 2]; their training has ended" in str(late.error)


def begins_late():
    if dist.get_rank() == 1:
        time.sleep(1.5 * PATIENCE_S)
    model, optimizer, *_ = begin("sgp()")
    generation = optimizer.controller.membership.generation
    for step in range(3):
        train(model, optimizer, step)
    optimizer.remove()
    return generation


def test_patience_counts_from_when_all_ranks_have_begun(pool):
    outcomes = pool.fresh(2, begins_late)
    assert [each.value for each in outcomes] == [0, 0], errors_of(outcomes)


def test_a_quorum_without_patience_is_refused():
    model = net()
    with pytest.raises(AttachError, match=r"quorum=2 .* set patience_s"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgp()", quorum=2)
