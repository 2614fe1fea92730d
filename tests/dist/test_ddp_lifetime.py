"""A handle on DDP from attaching to its end: removed, dropped, copied or failed; and a step left out."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import SGD, agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance, compressed


@on_ranks(2)
def test_a_removed_handle_leaves_plain_ddp_and_makes_room():
    model, optimizer, handle = compressed("dgc(density=0.05)", **MANY)
    for step in range(9):
        if step == 3:
            handle.remove()
        if step == 6:
            handle = laconic.compress(model, optimizer, "topk(density=0.05)")
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert agree(model) and handle.stats().steps == 3


def broken():
    from laconic.exchange.attached import Attached

    dist.barrier()  # the group's limit is for the error alone
    group = dist.new_group(timeout=timedelta(seconds=5))
    model, _, _ = compressed("topk(density=0.05)", process_group=group, **MANY)
    if dist.get_rank() == 0:
        Attached.mean_ = lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("on purpose"))  # type: ignore
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


@on_ranks(2)
def test_a_second_backward_without_a_step_is_warned_of():
    model, _, _ = compressed("dgc(density=0.1)")
    loss_of(model, 0).backward()
    with pytest.warns(UserWarning, match=r"no_sync"):
        loss_of(model, 1).backward()


def thrown_away(spec, how, to_none=True):
    """Two backward passes with zero_grad() between them: what was said, and how much of the first is in the
    second, whose own gradient is zero."""
    model, optimizer, handle = compressed(spec, **MANY)
    advance(model, optimizer, 2)
    handle.discard()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.zero_grad(set_to_none=to_none)
        if how == "no_sync":
            with model.no_sync():
                loss_of(model, 2).backward()
        else:
            loss_of(model, 2).backward()
        if how != "accumulated":
            optimizer.zero_grad(set_to_none=to_none)
        if how == "discarded":
            handle.discard()
        (0.0 * loss_of(model, 3)).backward()
        optimizer.zero_grad(set_to_none=to_none)
        handle.discard()
        (0.0 * loss_of(model, 3)).backward()
    norm = sum(float(p.grad.norm()) for p in model.parameters())
    words = [str(each.message) for each in said]
    handle.remove()
    left = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return [each for each in words if "thrown away" in each], norm, left


@on_ranks(2, (("topk(density=0.05)", True), ("topk(density=0.05)", False), ("dgc(density=0.05)", True)))
def test_gradients_that_are_thrown_away_are_warned_of(spec, to_none):
    """Once, with the way out; and after `discard` nothing is left of them."""
    (said,), norm, left = thrown_away(spec, "zeroed", to_none)
    assert "no_sync" in said and "handle.discard()" in said
    assert norm == 0 and left == 0


KEPT = [("topk(density=0.05)", how) for how in ("no_sync", "discarded", "accumulated")]


@on_ranks(2, [*KEPT, ("cgx(min_size=2)", "zeroed"), ("sum()", "zeroed")])
def test_who_throws_nothing_away_is_not_warned(spec, how):
    """Nothing was exchanged, or it was discarded, or accumulated; or the method holds nothing back."""
    assert thrown_away(spec, how)[0] == []


@on_ranks(2)
def test_a_dropped_model_takes_its_exchange_with_it():
    model, optimizer, handle = compressed("topk(density=0.1)")
    advance(model, optimizer, [0])
    exchange, thread = weakref.ref(handle.exchange), handle.buckets._thread._thread
    del model, optimizer, handle
    gc.collect()
    thread.join(timeout=60)
    assert exchange() is None and not thread.is_alive()


@on_ranks(2)
def test_an_optimiser_outlives_its_compressed_model():
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    laconic.compress(model, optimizer, "dgc(density=0.1)")
    stepped(model, 0)
    optimizer.step()
    del model
    gc.collect()
    hooks = [each for each in module.parameters() if each._backward_hooks or each._post_accumulate_grad_hooks]
    model = DistributedDataParallel(module)
    stepped(model, 1)
    optimizer.step()
    with_momentum = all("momentum_buffer" in optimizer.state[each] for each in module.parameters())
    handle = laconic.compress(model, optimizer, "topk(density=0.1)")
    stepped(model, 2)
    optimizer.step()
    assert with_momentum and len(hooks) == 0 and handle.stats().steps == 1 and agree(model)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
}


def stepped(model, step):
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    loss_of(model, step).backward()
    optimizer.step()
    return optimizer


@on_ranks(2, COPIES)
def test_a_copy_is_a_plain_model_and_can_be_compressed(how):
    model, optimizer, handle = compressed("topk(density=0.05)", **MANY)
    advance(model, optimizer, [0])
    other = COPIES[how](model)
    equal = torch.equal(flat(other), flat(model))

    optimizer = stepped(other, 1)
    plain = agree(other) and handle.stats().steps == 1
    inside = other if isinstance(other, DistributedDataParallel) else other.module
    second = laconic.compress(inside, optimizer, "dgc(density=0.05)")
    advance(other, optimizer, [2])
    loss_of(model, 1).backward()
    assert equal and plain and (second.stats().steps == 1 and handle.stats().steps == 2 and agree(other))
