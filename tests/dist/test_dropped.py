"""A model that is dropped without `remove()` takes its threads, its groups and their files with it."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.strategies.strategy import Strategy
from tests.dist.nets import SGD, net
from tests.dist.runs import advance
from tests.laws.strategy_ranks import fits
from tests.laws.table import specs

STRATEGIES = [  # where lsgd counts all ranks' steps, ranks may wait for each other at a barrier
    spec for spec in specs(Strategy) if fits(spec, 2) and "total" not in spec
]
METHODS = [
    "dgc(density=0.05)",
    "auto()",
    "cgx()",
    "two_level(sum(), gather(qsgd(levels=7)), ranks_per_node=1)",
]


def left():
    """Threads, of Python's and of gloo's, and open files of this process."""
    return threading.active_count(), *(
        len([*Path(f"/proc/self/{what}").iterdir()]) for what in ("task", "fd")
    )


def settled(before):
    """What is left once threads have had the time to end, as they do beside the caller."""
    deadline = time.monotonic() + 20
    gc.collect()
    while any(now > then for now, then in zip(left(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()  # a thread that has ended may leave a cycle
    return left()


def trained(spec, patience_s=None):
    model = net()
    if spec in METHODS:
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        laconic.compress(model, optimizer, spec)
    else:
        own = {**SGD, "momentum": 0.0, "nesterov": False}
        plain = torch.optim.SGD(model.parameters(), **own)
        model, optimizer = laconic.distribute(model, plain, spec, patience_s=patience_s)
    advance(model, optimizer, 3)
    dist.barrier()  # a rank that is gone while another trains counts as lost


def dropped(cases):
    """The cases that leave something behind, with what was there before and is there after."""
    trained(METHODS[0])  # threads that torch starts once
    faulty = []
    for case in cases:
        before = settled(left())
        trained(*case)
        after = settled(before)
        dist.barrier()
        if any(now > then for now, then in zip(after, before, strict=True)):
            faulty.append((case, before, after))
    return faulty


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "cases",
    [
        [(spec,) for spec in METHODS],
        pytest.param([(spec,) for spec in STRATEGIES], marks=pytest.mark.soak),
        [(spec, 60.0) for spec in ("local_sgd()", "osgp()", "adpsgd()")],
    ],
    ids=["methods", "strategies", "with patience"],
)
def test_a_dropped_model_leaves_nothing(pool, cases):
    assert pool.run(2, dropped, cases, timeout_s=150) == [[], []]


def freed_while_all_groups_are_destroyed(spec):
    destroying = inspect.unwrap(dist.destroy_process_group).__code__
    collected = []

    def collect(frame, event, argument):
        within = frame.f_back is not None and frame.f_back.f_code is destroying
        if event == "call" and within and frame.f_code.co_name == "<lambda>" and not collected:
            threads, deadline = threading.active_count(), time.monotonic() + 20
            collected.append(gc.collect())
            while threading.active_count() >= threads and time.monotonic() < deadline:
                time.sleep(0.01)  # the model's thread closes its group, and ends

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    cycle = [model, optimizer, laconic.compress(model, optimizer, spec)]
    cycle.append(cycle)
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, cycle
        sys.setprofile(collect)
        dist.destroy_process_group()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert collected[0] > 0 and not dist.is_initialized()


def test_a_model_may_be_freed_while_all_groups_are_destroyed(pool):
    for spec in (METHODS[0], METHODS[-1]):  # a job each, as it ends the default group
        pool.run(2, freed_while_all_groups_are_destroyed, spec)
