"""A handle on DDP from attaching to its end: removed, dropped, or failed; and a step that was left out."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.ddp_world import MANY
from tests.dist.nets import SGD, agree, loss_of, net


def remove_and_return():
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)")
    for step in range(9):
        if step == 3:
            handle.remove()
        if step == 6:
            handle = laconic.compress(model, optimizer, "topk(density=0.05)")
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return agree(model), handle.stats().steps


def test_a_removed_handle_leaves_plain_ddp_and_makes_room(pool):
    assert pool.run(2, remove_and_return) == [(True, 3)] * 2


def broken():
    from laconic.exchange.exchange import Exchange

    group = dist.new_group(timeout=timedelta(seconds=5))
    model = DistributedDataParallel(net(), process_group=group, **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    laconic.compress(model, optimizer, "topk(density=0.05)")
    if dist.get_rank() == 0:
        Exchange.mean_ = lambda *_: (_ for _ in ()).throw(ZeroDivisionError("on purpose"))  # type: ignore
    try:
        loss_of(model, 0).backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.timeout(120)
def test_an_error_in_the_thread_surfaces_in_backward(pool):
    answers = pool.fresh(2, broken, timeout_s=60)
    assert "ZeroDivisionError" in answers[0].value[1] and "rank 0" in answers[0].value[1]
    assert "rank 1" in answers[1].value[1], "the other rank hears of it, at its group's timeout at the latest"


def twice_without_a_step():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    laconic.compress(model, optimizer, "dgc(density=0.1)")
    loss_of(model, 0).backward()
    with pytest.warns(UserWarning, match=r"no_sync"):
        loss_of(model, 1).backward()
    return True


def test_a_second_backward_without_a_step_is_warned_of(pool):
    assert pool.run(2, twice_without_a_step) == [True, True]


def forgotten():
    """A model that is dropped without remove(): its exchange goes with it."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "topk(density=0.1)")
    loss_of(model, 0).backward()
    optimizer.step()
    exchange, thread = weakref.ref(handle.exchange), handle.buckets._thread._thread
    del model, optimizer, handle
    gc.collect()
    thread.join(timeout=5)
    return exchange() is None, thread.is_alive()


def test_a_dropped_model_takes_its_exchange_with_it(pool):
    assert pool.run(2, forgotten) == [(True, False)] * 2
