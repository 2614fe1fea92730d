"""Calls that every rank has to make: if one rank does something else, every rank raises a clear error.

The rows of the table in docs/faults.md are the cases of this file.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm import joint_calls
from laconic.core.errors import AttachError, PeerError, StateError
from tests.dist.nets import SGD, loss_of, net

FAULTS = Path(__file__).parents[2] / "docs" / "faults.md"
LIMIT_S = 15.0  # from when another rank began something else
GATHER = "state_dict(gather=True)"


def compressed(spec):
    model = DistributedDataParallel(net())
    plain = torch.optim.Adam if "adam" in spec else torch.optim.SGD
    optimizer = plain(model.parameters(), **({} if "adam" in spec else SGD))
    return model, optimizer, laconic.compress(model, optimizer, spec)


def distributed(spec, **options):
    model = net()
    plain = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = laconic.distribute(model, plain, spec, **options)
    return model, optimizer, optimizer


class Scaled:
    """An optimiser that steps by a GradScaler, which must have scaled the loss."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


def scaled(spec):
    model, scaler = net(), torch.amp.GradScaler("cpu")
    plain = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = laconic.distribute(model, plain, spec, scaler=scaler)
    return model, Scaled(optimizer, scaler), optimizer


def steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler = getattr(optimizer, "scaler", None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()


def noted(model, optimizer, numbers):
    """Steps of a strategy that elects leaders by their losses."""
    for step in numbers:
        optimizer.note_loss(1.0)
        steps(model, optimizer, [step])


def show_average(optimizer):
    with optimizer.averaged():
        pass


def gather(attached):
    attached.state_dict(gather=True)


def load_own(handle):
    handle.load_state_dict(handle.state_dict())


def sharded(spec):
    from torch.distributed.fsdp import fully_shard  # takes seconds

    model = fully_shard(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return model, optimizer, laconic.compress(model, optimizer, spec)


def refused(handle):
    """The handle's gather raises at once, on this rank alone."""
    with pytest.raises(StateError, match="save it on each rank"):
        gather(handle)


FED = "error_fed(scatter_reduce(minmax(bits=8)))"
MAKE = {
    "compress": compressed,
    "distribute": distributed,
    "distribute(scaler=)": scaled,
    "fully_shard": sharded,
}
SELDOM = "local_sgd(every=1000)"  # ranks meet in the scaler's checks alone
# Call, how the model is attached, spec, the call as a function, and the outcome if rank 0 alone makes it.
ALONE = (
    ("handle.state_dict(gather=True)", "compress", "topk(density=0.1)", gather, GATHER),
    ("handle.state_dict(gather=True)", "compress", "dgc(density=0.1)", gather, GATHER),
    ("handle.state_dict(gather=True)", "compress", "onebit_adam(warmup_steps=2)",
     gather, GATHER),
    ("handle.state_dict(gather=True)", "compress", "cgx()", gather, ""),
    ("handle.state_dict()", "compress", "topk(density=0.1)", lambda h: h.state_dict(), "warning"),
    ("handle.state_dict()", "compress", "cgx()", lambda h: h.state_dict(), ""),
    ("handle.state_dict(gather=True)", "fully_shard", FED, refused, ""),
    ("handle.state_dict(gather=True)", "fully_shard", "cgx()", gather, ""),
    ("handle.state_dict()", "fully_shard", FED, lambda h: h.state_dict(), "warning"),
    ("handle.state_dict()", "fully_shard", "cgx()", lambda h: h.state_dict(), ""),
    ("handle.load_state_dict(state)", "fully_shard", FED, lambda h: h.load_state_dict(h._state()), ""),
    ("handle.discard()", "fully_shard", FED, lambda h: h.discard(), ""),
    ("handle.stats()", "fully_shard", FED, lambda h: h.stats(), ""),
    ("handle.stats()", "compress", "cgx()", lambda h: h.stats(), ""),
    ("handle.load_state_dict(state)", "compress", "cgx()", load_own, ""),
    ("handle.discard()", "compress", "cgx()", lambda h: h.discard(), ""),
    ("optimizer.state_dict()", "distribute", "local_sgd(every=2)", lambda o: o.state_dict(), ""),
    ("optimizer.state_dict()", "distribute", "diloco(every=2)", lambda o: o.state_dict(), "state_dict()"),
    ("optimizer.state_dict(gather=True)", "distribute", "local_sgd(every=2)",
     gather, GATHER),
    ("optimizer.averaged()", "distribute", "local_sgd(every=2)", show_average, "averaged()"),
    ("optimizer.averaged()", "distribute", "sgp()", show_average, "averaged()"),
    ("optimizer.averaged()", "distribute", "osgp()", show_average, "averaged()"),
    ("optimizer.averaged()", "distribute(scaler=)", SELDOM, show_average, "averaged()"),
    ("optimizer.state_dict(gather=True)", "distribute(scaler=)", SELDOM, gather, GATHER),
    ("optimizer.stats()", "distribute(scaler=)", SELDOM, lambda o: o.stats(), ""),
    ("optimizer.stats()", "distribute", "local_sgd(every=2)", lambda o: o.stats(), ""),
    ("optimizer.discard()", "distribute", "local_sgd(every=2)", lambda o: o.discard(), ""),
    ("optimizer.load_state_dict(state)", "distribute", "local_sgd(every=2)", load_own, "load_state_dict()"),
)  # fmt: skip
ELSEWHERE = {  # rows with tests of their own
    "laconic.compress(...)": "test_waiting.py",
    "laconic.distribute(...)": "test_waiting.py",
    "handle.remove()": "test_joint_calls.py",
    "optimizer.finish()": "test_finishing.py",
    "optimizer.remove()": "test_joint_calls.py",
    "accelerator.save_state()": "../integrations/test_accelerate.py",
}


@contextmanager
def quick_reports():
    """Ranks report after a fifth of a second what they wait in."""
    before = joint_calls.REPORT_S, joint_calls.POLL_S
    joint_calls.REPORT_S, joint_calls.POLL_S = 0.2, 0.05
    try:
        yield
    finally:
        joint_calls.REPORT_S, joint_calls.POLL_S = before


def outcome(act):
    """The error or the warning of `act`, and its seconds."""
    start, text = time.monotonic(), ""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            act()
        except PeerError as error:
            text = str(error)
    return text or "".join(str(each.message) for each in found), time.monotonic() - start


def made_by_rank_0_alone():
    """What happens in each case, on this rank, while rank 1 goes on with its steps."""
    found = []
    for _, how, spec, call, _ in ALONE:
        with quick_reports():
            model, optimizer, attached = MAKE[how](spec)
            steps(model, optimizer, range(4))

            def go_on(call=call, model=model, optimizer=optimizer, attached=attached):
                if dist.get_rank() == 0:
                    call(attached)
                steps(model, optimizer, range(4, 8))

            found.append(outcome(go_on))
            dist.barrier()
    return found


def test_a_call_on_one_rank_ends_every_rank_with_a_clear_error(pool):
    first, second = pool.run(2, made_by_rank_0_alone, timeout_s=240.0)
    for (call, _, spec, _, expected), (on_0, s_0), (on_1, s_1) in zip(ALONE, first, second, strict=True):
        case = f"{call} with {spec}: rank 0: {on_0!r}, rank 1: {on_1!r}"
        if expected == "warning":
            assert "other ranks did not" in on_0 and not on_1, case
        elif not expected:
            assert not on_0 and not on_1, case
        else:
            assert f"rank 0 is in {expected}, and rank 1 went on to " in on_0, case
            assert "rank 1 is in " in on_1 and f"rank 0 is in {expected}: every rank has to" in on_1, case
        assert max(s_0, s_1) < LIMIT_S, case


PATIENCE_S = 60.0
TOTAL = "lsgd(every=8, local_every=4, ranks_per_node=1, count='total')"
# Call, spec, patience_s, the call as a function, and the later call of rank 1, or "" for its steps.
AT_ANY_PACE = (
    ("averaged()", "adpsgd()", None, show_average, ""),
    ("averaged()", "slowmo(every=1000, base=adpsgd())", None, show_average, ""),
    ("state_dict()", "adpsgd()", None, lambda o: o.state_dict(), ""),
    (GATHER, "adpsgd()", None, gather, ""),
    ("averaged()", TOTAL, None, show_average, "finish()"),
    (GATHER, TOTAL, None, gather, "finish()"),
    ("averaged()", "local_sgd(every=1000)", None, show_average, ""),
    ("averaged()", "adpsgd()", PATIENCE_S, show_average, ""),
    ("averaged()", "sgp()", PATIENCE_S, show_average, ""),
    ("averaged()", "local_sgd(every=1000)", PATIENCE_S, show_average, ""),
    ("averaged()", "diloco(every=4)", PATIENCE_S, show_average, ""),
    ("state_dict()", "diloco(every=4)", PATIENCE_S, lambda o: o.state_dict(), ""),
    (GATHER, "osgp()", PATIENCE_S, gather, ""),
)


def made_at_any_pace():
    """What happens in each case on this rank, while rank 1 takes steps for at most 15 s, and ends."""
    found = []
    for _, spec, patience_s, call, later in AT_ANY_PACE:
        with quick_reports():
            model, optimizer, _ = distributed(spec, patience_s=patience_s)
            noted(model, optimizer, range(4))

            def go_on(call=call, model=model, optimizer=optimizer, later=later):
                if dist.get_rank() == 0:
                    call(optimizer)
                for step in range(4, 20 if later else 1500):
                    noted(model, optimizer, [step])
                    time.sleep(0.01)
                optimizer.finish()

            found.append(outcome(go_on))
            dist.barrier()
    return found


def test_a_call_on_one_rank_is_found_where_no_rank_waits_in_a_step(pool):
    first, second = pool.run(2, made_at_any_pace, timeout_s=240.0)
    for (call, spec, patience, _, later), (on_0, s_0), (on_1, s_1) in zip(
        AT_ANY_PACE, first, second, strict=True
    ):
        case = f"{call} with {spec}, patience_s={patience}: rank 0: {on_0!r}, rank 1: {on_1!r}"
        went_on = f"is in {later}" if later else "went on to step "
        assert f"rank 0 is in {call}, and rank 1 {went_on}" in on_0, case
        assert f"rank 1 is in {later or 'step '}" in on_1 and f"rank 0 is in {call}" in on_1, case
        assert "every rank has to make this call" in on_0 and "every rank has to" in on_1, case
        assert max(s_0, s_1) < LIMIT_S, case


def test_the_table_has_a_row_for_each_call():
    section = FAULTS.read_text("utf-8").split("## Calls that every rank makes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)`", section, re.MULTILINE)
    assert {call for call, *_ in ALONE} | ELSEWHERE.keys() == set(rows)
    assert all((Path(__file__).parent / test).exists() for test in ELSEWHERE.values())


def ends_by_a_refused_call():
    """Rank 0 ends by the refusal, as a script does; the error of rank 1, and its seconds."""
    model, optimizer, handle = sharded(FED)
    steps(model, optimizer, range(2))
    if dist.get_rank() == 0:
        refused(handle)
        os._exit(1)
    start, text = time.monotonic(), ""
    while not text and time.monotonic() < start + 2 * LIMIT_S:
        try:
            steps(model, optimizer, [2])
        except RuntimeError as error:
            text = str(error)
    return text, time.monotonic() - start


def test_a_rank_that_ends_by_a_refused_call_ends_the_others(pool):
    first, second = pool.fresh(2, ends_by_a_refused_call)
    assert first.exit_code == 1 and second.error is None, (first, second)
    assert second.value[0] and second.value[1] < LIMIT_S, second


def without_shorter_waits():
    model, optimizer, handle = compressed("topk(density=0.1)")
    steps(model, optimizer, range(2))
    if dist.get_rank():
        return outcome(lambda: steps(model, optimizer, range(2, 4)))
    return outcome(lambda: handle.state_dict(gather=True))


def test_every_rank_has_raised_in_time(pool):
    found = pool.run(2, without_shorter_waits)
    assert all(text and seconds < 2 * LIMIT_S for text, seconds in found), found


def later_calls_and_threads():
    """After rank 0 alone has gathered: the error of the next call, and names of threads that still wait."""
    with quick_reports():
        model, optimizer, handle = compressed("topk(density=0.1)")
        steps(model, optimizer, range(2))
        if dist.get_rank():
            outcome(lambda: steps(model, optimizer, range(2, 4)))
        else:
            outcome(lambda: gather(handle))
    with mock.patch.object(joint_calls.JointCalls, "_meet", side_effect=AssertionError("it waits again")):
        text, _ = outcome(lambda: gather(handle))
    deadline = time.monotonic() + 60.0
    while waiting := [each.name for each in threading.enumerate() if each.name.startswith(GATHER)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return text, waiting


def test_after_a_failed_call_no_thread_waits_and_later_calls_fail_at_once(pool):
    for text, waiting in pool.run(2, later_calls_and_threads):
        assert f"rank 0 is in {GATHER}" in text and not waiting, (text, waiting)


def removed_before_another_looks():
    """Rank 0 alone gathers, and removes its handle when that fails; rank 1 looks for the reason late."""
    with quick_reports():
        model, optimizer, handle = compressed("topk(density=0.1)")
        steps(model, optimizer, range(2))
        if dist.get_rank() == 0:
            found = outcome(lambda: gather(handle))
            handle.remove()
            dist.barrier()
            return found
        calls, plain = handle._joint_calls, handle._joint_calls._missed_call

        def late():
            dist.barrier()
            return plain()

        calls._missed_call = late
        return outcome(lambda: steps(model, optimizer, range(2, 4)))


def test_a_removed_handle_still_says_which_call_has_failed(pool):
    for text, _ in pool.run(2, removed_before_another_looks):
        assert f"rank 0 is in {GATHER}" in text, text


def different_calls():
    model, optimizer, wrapped = distributed("local_sgd(every=2)")
    steps(model, optimizer, range(4))
    return outcome(wrapped.finish if dist.get_rank() else lambda: wrapped.state_dict(gather=True))


def test_ranks_in_different_calls_name_both(pool):
    (first, _), (second, _) = pool.run(2, different_calls)
    assert f"rank 0 is in {GATHER}, and rank 1 is in finish()" in first
    assert f"rank 1 is in finish(), and rank 0 is in {GATHER}" in second


def rank_1_attaches_another_method():
    """The error of an attachment that the ranks do not agree on."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters())
    start, spec = time.monotonic(), "cgx()" if dist.get_rank() else "zero_one_adam()"
    with pytest.raises(AttachError) as caught:
        laconic.compress(model, optimizer, spec)
    return str(caught.value), time.monotonic() - start


def test_a_failed_attachment_is_undone_without_a_joint_call(pool):
    """Replicas of 0/1 Adam differ between rounds, so its `remove()` takes all ranks to make them equal."""
    for text, seconds in pool.run(2, rank_1_attaches_another_method):
        assert text.startswith("nothing was attached: the spec differs") and seconds < LIMIT_S, text


def last_part_fails(spec, *parts):
    """An error in a late part of `distribute`: the threads that are left. A later call works."""
    before = {*threading.enumerate()}
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for part in parts:
        fails = mock.patch(f"laconic.strategies.{part}", side_effect=ZeroDivisionError)
        with fails, pytest.raises(ZeroDivisionError) as caught:
            laconic.distribute(model, optimizer, spec)
        deadline = time.monotonic() + 60.0
        while left := {*threading.enumerate()} - before:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        del caught
        if left:
            return [each.name for each in left]
    model, optimizer = laconic.distribute(model, optimizer, spec)
    steps(model, optimizer, range(2))
    optimizer.remove()
    return []


def test_an_error_after_a_strategy_was_bound_ends_its_threads(pool):
    late = "distribute.DistributedOptimizer"
    for spec in ("osgp()", "adpsgd()"):
        assert pool.run(2, last_part_fails, spec, "replica.Replica.publish", late) == 2 * [[]]
    assert pool.run(2, last_part_fails, "topk(density=0.1)", late) == 2 * [[]]


def rank_1_removes():
    model, optimizer, handle = compressed("topk(density=0.1)")
    steps(model, optimizer, range(2))
    if dist.get_rank():
        handle.remove()
        return "", 0.0
    return outcome(lambda: handle.state_dict(gather=True))


def test_a_call_after_another_rank_has_removed_its_handle_says_so(pool):
    (text, seconds), _ = pool.run(2, rank_1_removes)
    assert f"rank 0 is in {GATHER}, and " in text and ("ended" in text or "remove()" in text), text
    assert seconds < LIMIT_S


def lost_another_before():
    """After a regroup rank 0 alone asks for the average: the seconds, and the groups formed."""
    with quick_reports():
        model, optimizer, _ = distributed("sgp()", patience_s=3.0, quorum=2)
        steps(model, optimizer, range(4))
        optimizer.controller._regroup(4, "a rank was lost")
        start = time.monotonic()
        if dist.get_rank() == 0:
            show_average(optimizer)
        for step in range(4, 50):
            steps(model, optimizer, [step])
            time.sleep(0.01)
        optimizer.finish()
        seconds = time.monotonic() - start
        optimizer.remove()
    return seconds, optimizer.controller.membership.generation


def test_after_a_loss_such_a_call_costs_a_new_group(pool):
    for seconds, generation in pool.run(2, lost_another_before):
        assert seconds < LIMIT_S and generation >= 2, (seconds, generation)


def others_remove(spec):
    """Rank 1 removes its optimizer, while rank 0 asks for the average."""
    with quick_reports():
        model, optimizer, _ = distributed(spec)
        noted(model, optimizer, range(4))
        found = outcome(optimizer.remove if dist.get_rank() else lambda: show_average(optimizer))
        dist.barrier()
    return found


def test_a_rank_that_removes_its_optimizer_ends_a_call_of_another(pool):
    for spec in ("local_sgd(every=2)", "osgp()", "adpsgd()", TOTAL):
        (text, seconds), (_, late_s) = pool.run(2, others_remove, spec)
        assert "rank 0 is in averaged(), and rank 1" in text and "remove()" in text, (spec, text)
        assert max(seconds, late_s) < LIMIT_S, (spec, seconds, late_s)


def next_after_a_removal(make, spec):
    """Rank 1 removes; the error of rank 0's next steps."""
    model, optimizer, attached = MAKE[make](spec)
    steps(model, optimizer, range(2))
    if dist.get_rank():
        attached.remove()
        dist.barrier()
        return "", 0.0
    found = outcome(lambda: steps(model, optimizer, range(2, 6)))
    dist.barrier()
    return found


def test_the_next_exchange_after_a_removal_raises(pool):
    for make, spec in (("compress", "topk(density=0.1)"), ("distribute", "sgp()")):
        (text, seconds), _ = pool.run(2, next_after_a_removal, make, spec)
        assert text and seconds < LIMIT_S, (make, text, seconds)


def rank_1_is_slow():
    with quick_reports():
        model, optimizer, handle = compressed("topk(density=0.1)")
        steps(model, optimizer, range(2))
        if dist.get_rank():
            time.sleep(2.0)
        state = handle.state_dict(gather=True)
        steps(model, optimizer, range(2, 4))
    return len(state["ranks"])


def test_a_slow_rank_is_waited_for(pool):
    assert pool.run(2, rank_1_is_slow) == [2, 0]


def saved_without_memory():
    model, optimizer, handle = compressed("cgx()")
    steps(model, optimizer, range(2))
    state = [handle.state_dict(gather=True) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    steps(model, optimizer, range(2, 4))
    handle.load_state_dict(state[0])
    return [(each["rank"], each["step"], len(each["tensors"])) for each in state[0]["ranks"]]


def test_rank_0_alone_gathers_what_has_no_memory(pool):
    assert pool.run(2, saved_without_memory) == 2 * [[(0, 2, 0), (1, 2, 0)]]
