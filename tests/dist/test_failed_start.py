"""A call that attaches and fails late leaves no process group open, and can be made again."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import laconic
from tests.dist.nets import agree, loss_of, net
from tests.dist.pool import on_ranks

WATCH = "laconic.comm.joint_calls.start_thread"
FAILING = {  # the last constructors of each call
    "compress": ["laconic.ddp.attach.JointCalls", WATCH, "laconic.ddp.attach.StepChecks"],
    "distribute": ["laconic.strategies.membership.JointCalls", WATCH],
    "distribute(patience_s=)": [
        "laconic.strategies.membership.Metered",
        "laconic.strategies.membership.Generations",
    ],
}
CASES = [(call, place) for call, places in FAILING.items() for place in places]


class Refused(Exception):
    """The error of `Refusing`."""


class Refusing:
    """A constructor that raises once all ranks are there: closing groups would end the start of others."""

    def __call__(self, *args, **kwargs):
        dist.barrier()
        raise Refused

    of = __call__


def start(call):
    if call == "compress":
        model = DistributedDataParallel(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        return model, optimizer, lambda: laconic.compress(model, optimizer, "topk(density=0.1)")
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"patience_s": 20.0} if "patience" in call else {}
    return model, optimizer, lambda: laconic.distribute(model, optimizer, "local_sgd(every=2)", **options)[1]


def groups():
    return len(dist.distributed_c10d._world.pg_map)


@on_ranks(2, CASES)
def test_a_call_that_fails_late_leaves_no_group_and_no_thread(call, place):
    model, optimizer, attach = start(call)
    before, threads = groups(), threading.active_count()
    with mock.patch(place, Refusing()), pytest.raises(Refused):
        attach()
    assert groups() == before
    deadline = time.monotonic() + 60.0  # a thread ends when it next looks
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads, threading.enumerate()
    dist.barrier()
    attached = attach()
    for step in range(2):
        loss_of(model, step).backward()
        (optimizer if call == "compress" else attached).step()
    if call == "compress":
        assert agree(model)
    else:
        attached.finish()
    attached.remove()
    assert groups() == before
