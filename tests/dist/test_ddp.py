"""The DDP strategy in real processes over gloo."""

from __future__ import annotations

import gc
import io
import math
import re
import weakref
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError, LaconicError, NonFiniteError, SpecError, StateError
from tests.dist.composition import Sometimes, Words
from tests.dist.nets import SGD, agree, flat, loss_of, net, train

MANY = {"bucket_cap_mb": 0.01}  # about eight buckets, regrouped after the first step
METHODS = ["dense()", "fp16()", "bf16()", "topk(density=0.05)", "randomk(density=0.05)", "dgc(density=0.05)"]


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_stay_bit_identical(pool, spec, size):
    for _, same, stats in pool.run(size, train, spec):
        assert same
        assert stats.steps == 6
        assert stats.payload_sent <= stats.dense


def dense_and_plain(size_of_buckets):
    ddp = {"bucket_cap_mb": size_of_buckets}
    return train(None, **ddp)[0], train("dense()", **ddp)[0], train("dgc(density=1)", **ddp)[0]


@pytest.mark.parametrize("cap", [0.01, 25])
def test_dense_and_density_one_are_plain_ddp(pool, cap):
    """Not bit for bit: DDP divides before the sum, we after it. Tolerance: float32 over 6 steps."""
    for plain, dense, density_one in pool.run(2, dense_and_plain, cap):
        torch.testing.assert_close(dense, plain, rtol=1e-5, atol=1e-6)
        assert torch.equal(dense, density_one)


def buckets_and_one(spec):
    return train(spec, **MANY)[0], train(spec)[0], train(spec, gradient_as_bucket_view=True, **MANY)[0]


@pytest.mark.parametrize("spec", ["topk(density=0.05)", "dgc(density=0.05, warmup_steps=3)"])
def test_buckets_do_not_matter(pool, spec):
    """With 2 ranks: with more, the ring sums dense vectors in another order when buckets differ."""
    for many, one, views in pool.run(2, buckets_and_one, spec):
        assert torch.equal(many, one)
        assert torch.equal(many, views)


def warm_up_by_list():
    plain = train("dense()", steps=3)[0]
    dense_first = train("dgc(density=0.05, warmup_steps=6, warmup=[1.0, 0.3])", steps=3)[0]
    after = train("dgc(density=0.05, warmup_steps=6, warmup=[1.0, 0.3])", steps=8)
    return plain, dense_first, after[1]


def test_a_dense_warm_up_is_plain_momentum_sgd(pool):
    for plain, dense_first, same in pool.run(2, warm_up_by_list):
        assert torch.equal(plain, dense_first)
        assert same


def stop_and_go(spec):
    """Ten steps, and four then six in a new process group's worth of objects."""
    whole = train(spec, steps=10, **MANY)[0]
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, spec)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    file = io.BytesIO()
    saved = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "laconic": handle.state_dict(),
    }
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(key.startswith(f"rank{dist.get_rank()}/") for key in saved["laconic"]["tensors"])

    plain = net(seed=99)
    plain.load_state_dict(saved["model"])  # the trained model loads without Laconic
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    optimizer.load_state_dict(saved["optimizer"])
    handle = laconic.compress(model, optimizer, spec)
    handle.load_state_dict(saved["laconic"])
    for step in range(4, 10):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return whole, flat(model)


RESUMED = (
    "topk(density=0.05)",
    "randomk(density=0.1)",
    "dgc(density=0.05, warmup_steps=6)",
    "dgc(density=0.05, warmup_steps=12, warmup=[1.0, 0.3])",  # stops inside the dense part
)


@pytest.mark.parametrize("spec", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


def foreign_states():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "topk(density=0.05)")
    loss_of(model, 0).backward()
    state = handle.state_dict()
    said = []
    for change in (
        {"rank": 7},
        {"size": 3},
        {"spec": "topk(density=0.5)"},
        {"model": "another"},
        {"tensors": {}},
    ):
        try:
            handle.load_state_dict({**state, **change})
        except StateError as error:
            said.append(str(error))
    return said


def test_a_state_that_belongs_elsewhere_is_refused(pool):
    for said in pool.run(2, foreign_states):
        assert len(said) == 5
        assert "rank" in said[0] and "laconic.resize" in said[1] and "topk" in said[2]


def state_of_one():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return handle.state_dict()


def load_resized(states):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)")
    handle.load_state_dict(states[dist.get_rank()])
    return handle.state_dict()["step"]


def test_resize_keeps_the_mean_of_what_was_held(pool):
    states = pool.run(4, state_of_one)
    fewer = laconic.resize(states, 2)
    key = "route0/residual/0.weight"
    held = sum(state["tensors"][f"rank{r}/{key}"] for r, state in enumerate(states)) / 4
    assert held.abs().sum() > 0
    for r, state in enumerate(fewer):
        torch.testing.assert_close(state["tensors"][f"rank{r}/{key}"], held)
    assert pool.run(2, load_resized, fewer) == [3, 3]
    with pytest.raises(StateError, match="all ranks in rank order"):
        laconic.resize(states[1:], 2)


def overflow(scaled, when):
    """Inf on rank 1 at one step, in one of many buckets."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) if scaled else None
    handle = laconic.compress(model, optimizer, "dgc(density=0.05)", scaler=scaler)
    parameters, errors = [flat(model)], []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and dist.get_rank() == 1:
            weight = next(p for p in model.parameters() if p.ndim > 1)
            loss = loss + spike(weight)
        if scaler is None:
            loss.backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                errors.append(str(error))
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        parameters.append(flat(model))
    memory = handle.state_dict()["tensors"]
    finite = all(bool(value.isfinite().all()) for value in memory.values())
    return parameters, finite, agree(model), errors, None if scaler is None else scaler.get_scale()


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        out = torch.zeros_like(weight)
        out.view(-1)[7] = math.inf
        return out


def spike(weight: torch.Tensor) -> torch.Tensor:
    """Zero, with a gradient that is Inf in one place."""
    return _Spike.apply(weight)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_inf_on_one_rank_skips_the_step_on_all(pool, scaled, when):
    """Also in the first step, and in the next, when DDP has just regrouped its buckets."""
    for parameters, finite, same, errors, scale in pool.run(2, overflow, scaled, when):
        assert finite and same
        moved = [not torch.equal(a, b) for a, b in pairwise(parameters)]
        assert moved == [step != when for step in range(5)], "that step was skipped, and no other"
        if scaled:
            assert scale == 512.0 and not errors
        else:
            assert len(errors) == 1 and ("0.weight" in errors[0] or "another rank" in errors[0])


def scaled_and_not():
    out = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        laconic.compress(model, optimizer, "topk(density=0.1)", scaler=scaler)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        out.append(flat(model))
    return out


def test_residuals_do_not_mix_scales(pool):
    """The scale doubles every two steps, powers of two: the same bits as without a scaler."""
    for plain, scaled in pool.run(2, scaled_and_not):
        assert torch.equal(plain, scaled)


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
        ("adam", AttachError, "sampled_topk"),
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


def subgroup():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model = DistributedDataParallel(net(), process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    laconic.compress(model, optimizer, "dgc(density=0.05)")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return flat(model)


def test_a_ddp_on_a_subgroup(pool):
    a, b, c, d = pool.run(4, subgroup)
    assert torch.equal(a, b) and torch.equal(c, d)
    assert not torch.equal(a, c)


def broken():
    from laconic.strategies.exchange import Exchange

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


def half_an_optimiser():
    model = DistributedDataParallel(net())
    try:
        laconic.compress(model, torch.optim.SGD(list(model.parameters())[:2], **SGD), "dgc(density=0.1)")
    except AttachError as error:
        return str(error)
    return None


def test_dgc_wants_all_parameters_in_one_optimiser(pool):
    assert all("one optimiser" in answer for answer in pool.run(2, half_an_optimiser))


def never_used(spec):
    """How far a branch that no rank ever uses moves, and the rest."""
    model = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    if spec is not None:
        laconic.compress(model, optimizer, spec)
    start = flat(model.module.third), flat(model.module.first)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    before = flat(model.module.first)
    optimizer.step()  # without a backward pass there is nothing to apply
    return (
        torch.equal(start[0], flat(model.module.third)),
        torch.equal(start[1], before),
        torch.equal(before, flat(model.module.first)),
    )


@pytest.mark.parametrize("spec", [None, "dense()", "topk(density=0.05)", "dgc(density=0.05)"])
def test_what_is_never_used_never_moves(pool, spec):
    assert pool.run(2, never_used, spec) == [(True, False, True)] * 2


def sparse_moves(spec):
    """How far an embedding with sparse gradients moves."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = laconic.compress(model, optimizer, spec)
    start = flat(model.module.words)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert not any("words" in key for key in handle.state_dict()["tensors"])
    return float((flat(model.module.words) - start).norm())


def test_sparse_embeddings_keep_their_momentum_under_dgc(pool):
    """At a density near 1 without masking DGC is momentum SGD, for sparse gradients too."""
    dense = pool.run(2, sparse_moves, "dense()")[0]
    warming = "dgc(density=0.9, warmup_steps=4, warmup=[1.0, 0.95])"
    for spec in ("dgc(density=0.9999, masking=False)", warming):
        assert pool.run(2, sparse_moves, spec)[0] == pytest.approx(dense, rel=0.2)


def sparse_overflow():
    torch.manual_seed(0)
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    laconic.compress(model, optimizer, "topk(density=0.1)")
    loss = loss_of(model, 0) * (math.inf if dist.get_rank() == 1 else 1.0)
    loss.backward()
    try:
        optimizer.step()
    except NonFiniteError:
        return agree(model)
    return False


def test_inf_in_a_sparse_gradient_is_refused_too(pool):
    assert pool.run(2, sparse_overflow) == [True, True]


def forgotten():
    """A model that is dropped without remove(): its exchange goes with it."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "topk(density=0.1)")
    loss_of(model, 0).backward()
    optimizer.step()
    exchange, thread = weakref.ref(handle.buckets.exchange), handle.buckets.fifo._thread
    del model, optimizer, handle
    gc.collect()
    thread.join(timeout=5)
    return exchange() is None, thread.is_alive()


def test_a_dropped_model_takes_its_exchange_with_it(pool):
    assert pool.run(2, forgotten) == [(True, False)] * 2
