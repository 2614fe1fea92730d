"""DDP's replicas in real processes over gloo: equal, and plain DDP's where nothing is left out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.exchange.method import lift
from tests.dist.composition import Sometimes, Words
from tests.dist.nets import agree, compress_anyway, flat, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance, compressed, train
from tests.laws.method_ranks import optimizer_for
from tests.laws.table import compressors, first_of_each

TOPK = "sparse(topk(density=0.05), indices=golomb())"
SERVER = f"server({TOPK}, {TOPK})"

POLICY = (
    f"by_name({{'0.*': terngrad(), '*1*.weight': {SERVER}}}, rest=by_size(1000, large=dgc(density=0.05)))"
)
SHARE = {  # at most so much of the dense bytes; settings that this model's small tensors need, by reducer
    **dict.fromkeys(("dense()", "fp16()", "bf16()"), 1.0),
    **dict.fromkeys(("topk(density=0.05)", "randomk(density=0.05)", "dgc(density=0.05)"), 1.0),
    **dict.fromkeys(("oktopk(density=0.05, every=2)", "cltk(density=0.05)", "gtopk(density=0.05)"), 0.25),
    "cgx(min_size=100)": 0.5,
    "cgx(bits=8, rounding='stochastic', pattern='tree')": 0.5,
    "cgx(bits=3, block=64, pattern='ring', adapt_every=2)": 0.5,
    "scatter_reduce(sparse(topk(density=0.05)), pattern='tree', feedback='both')": 0.5,
    "scatter_reduce(minmax(bits=2, block=16), pattern='ring', feedback='both')": 0.5,
    "powersgd(rank=1)": 0.5,
    "powersgd()": 0.5,
    "terngrad()": 0.5,
    "terngrad(scale='own', packing='base3', last_layer='fp32')": 0.5,
    "shared_scale(levels=7, clip=0, block=64)": 0.5,
    SERVER: 0.5,
    "server(natural(), natural())": 0.5,
    POLICY: 0.5,
}
SHARE_OF_MANY = {f"{name}(density=0.05)": 0.5 for name in ("deft", "micro", "exdyna")}
SHARES = [(*each, {}) for each in SHARE.items()] + [(*each, MANY) for each in SHARE_OF_MANY.items()]


def stays_identical(spec, most, ddp):
    parameters, same, stats = train(spec, 4, **ddp)
    assert same and stats.steps == 4
    assert stats.payload_sent <= most * parameters.nbytes * stats.steps


@on_ranks((1, 4), SHARES, timeout_s=300)
def test_replicas_stay_bit_identical(spec, most, ddp):
    stays_identical(spec, most, ddp)


@pytest.mark.nightly
@on_ranks((2, 3), SHARES, timeout_s=300)
def test_replicas_stay_bit_identical_in_groups_of_two_and_three(spec, most, ddp):
    stays_identical(spec, most, ddp)


@on_ranks(2, first_of_each(compressors()), timeout_s=300)
def test_every_registered_method_keeps_replicas_alike_on_many_buckets(spec):
    """DDP regroups buckets after the first step. With all laws, on threads: `tests/laws`."""
    method = lift(spec)
    model = DistributedDataParallel(net(), **MANY)
    optimizer = optimizer_for(method, [*model.parameters()])
    handle = compress_anyway(model, optimizer, method)
    advance(model, optimizer, 2)
    handle.remove()
    assert agree(model)


@on_ranks(2, (0.01, 25))
def test_dense_and_density_one_are_plain_ddp(cap):
    """Not bit for bit: DDP divides before the sum, we after it. Tolerance: float32 over 6 steps."""
    plain, dense, density_one = (
        train(spec, bucket_cap_mb=cap)[0] for spec in (None, "dense()", "dgc(density=1)")
    )
    torch.testing.assert_close(dense, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(dense, density_one)


@on_ranks(2)
def test_a_dense_warm_up_is_plain_momentum_sgd():
    warming = "dgc(density=0.05, warmup_steps=6, warmup=[1.0, 0.3])"
    assert torch.equal(train("dense()", steps=3)[0], train(warming, steps=3)[0])
    assert train(warming, steps=8)[1]


def subgroup():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer, _ = compressed("dgc(density=0.05)", process_group=groups[dist.get_rank() // 2])
    advance(model, optimizer, 4)
    return flat(model)


def test_a_ddp_on_a_subgroup(pool):
    a, b, c, d = pool.run(4, subgroup)
    assert torch.equal(a, b) and torch.equal(c, d)
    assert not torch.equal(a, c)


@on_ranks(2, (None, "dense()", "topk(density=0.05)", "dgc(density=0.05)"))
def test_what_is_never_used_never_moves(spec):
    model, optimizer, _ = compressed(spec, Sometimes(), find_unused_parameters=True)
    start = flat(model.module.third), flat(model.module.first)
    advance(model, optimizer, 4)
    before = flat(model.module.first)
    assert torch.equal(start[0], flat(model.module.third)) and not torch.equal(start[1], before)
    optimizer.zero_grad()
    optimizer.step()  # without a backward pass there is nothing to apply
    assert torch.equal(before, flat(model.module.first))


def sparse_moves(spec):
    """The distance that an embedding with sparse gradients moves."""
    model, optimizer, handle = compressed(spec, Words(), sgd={"lr": 0.05, "momentum": 0.9})
    start = flat(model.module.words)
    advance(model, optimizer, 6)
    assert not any("words" in key for key in handle.state_dict()["tensors"])
    return float((flat(model.module.words) - start).norm())


def test_sparse_embeddings_keep_their_momentum_under_dgc(pool):
    """At a density near 1 without masking DGC is momentum SGD, for sparse gradients too."""
    warming = "dgc(density=0.9, warmup_steps=4, warmup=[1.0, 0.95])"
    specs = ("dense()", "dgc(density=0.9999, masking=False)", warming)
    dense, *others = (moves for _, (moves, _) in pool.each(2, sparse_moves, specs))
    assert others == [pytest.approx(dense, rel=0.2)] * 2
