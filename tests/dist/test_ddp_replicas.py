"""DDP's replicas in real processes over gloo: equal, and plain DDP's where nothing is left out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange.method import lift
from tests.dist.composition import Sometimes, Words
from tests.dist.ddp_world import MANY
from tests.dist.nets import SGD, agree, compress_anyway, flat, loss_of, net, train
from tests.laws.method_ranks import optimizer_for
from tests.laws.table import compressors

TOPK = "sparse(topk(density=0.05), indices=golomb())"
SERVER = f"server({TOPK}, {TOPK})"

POLICY = (
    f"by_name({{'0.*': terngrad(), '*1*.weight': {SERVER}}}, rest=by_size(1000, large=dgc(density=0.05)))"
)
SHARE = {  # at most so much of the dense bytes; settings that this model's small tensors need, by reducer
    "dense()": 1.0,
    "fp16()": 1.0,
    "bf16()": 1.0,
    "topk(density=0.05)": 1.0,
    "randomk(density=0.05)": 1.0,
    "dgc(density=0.05)": 1.0,
    "oktopk(density=0.05, every=2)": 0.25,
    "cltk(density=0.05)": 0.25,
    "gtopk(density=0.05)": 0.25,
    "cgx(min_size=100)": 0.5,
    "cgx(bits=8, rounding='stochastic', pattern='tree')": 0.5,
    "cgx(bits=3, block=64, pattern='ring', adapt_every=2)": 0.5,
    "scatter_reduce(sparse(topk(density=0.05)), pattern='tree', feedback='both')": 0.5,
    "scatter_reduce(minmax(bits=2, block=16), pattern='ring', feedback='both')": 0.5,
    "powersgd(rank=1)": 0.5,
    "powersgd(rank=4)": 0.5,
    "terngrad()": 0.5,
    "terngrad(scale='own', packing='base3', last_layer='fp32')": 0.5,
    "shared_scale(levels=7, clip=0, block=64)": 0.5,
    SERVER: 0.5,
    "server(natural(), natural())": 0.5,
    POLICY: 0.5,
}
SHARE_OF_MANY = {f"{name}(density=0.05)": 0.5 for name in ("deft", "micro", "exdyna")}


def in_turn(specs, ddp):
    """Of each: whether replicas agree after a few steps, how many these were, and the share of payload."""
    found = []
    for spec in specs:
        parameters, same, stats = train(spec, **ddp)
        found.append((spec, same, stats.steps, stats.payload_sent / (parameters.nbytes * stats.steps)))
    return found


@pytest.mark.parametrize(("most", "ddp"), [(SHARE, {}), (SHARE_OF_MANY, MANY)], ids=["one", "many"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_stay_bit_identical(pool, most, ddp, size):
    for found in pool.run(size, in_turn, [*most], ddp, timeout_s=240):
        for spec, same, steps, share in found:
            assert same and steps == 6, spec
            assert share <= most[spec], spec


def registered(specs):
    """What of these fails to keep replicas alike on many buckets, which DDP regroups after the first step."""
    failed = []
    for spec in specs:
        method = lift(spec)
        model = DistributedDataParallel(net(), **MANY)
        optimizer = optimizer_for(method, [*model.parameters()])
        handle = compress_anyway(model, optimizer, method)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        handle.remove()
        if not agree(model):
            failed.append(spec)
    return failed


def test_every_registered_method_keeps_replicas_alike(pool):
    """On threads, with all their laws, they are in `tests/laws`; here they run under DDP, over gloo."""
    assert pool.run(2, registered, compressors(), timeout_s=240) == [[], []]


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
    handle = compress_anyway(model, optimizer, spec)
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
