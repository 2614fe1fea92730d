"""Ok-Topk, CLT-k and global top-k in real processes over gloo, on many buckets that DDP regroups."""

from __future__ import annotations

import pytest
import torch

from tests.dist.ddp_world import MANY, stop_and_go
from tests.dist.nets import train
from tests.dist.test_low_bits_ddp import overflow

METHODS = ("oktopk(density=0.05, every=2)", "cltk(density=0.05)", "gtopk(density=0.05)")


def both_ways():
    fast = train(METHODS[0], **MANY)[0]
    return fast, train(METHODS[0])[0], train(METHODS[2], **MANY)[0]


def test_oktopk_trains_as_global_top_k_does_however_buckets_are_cut(pool):
    """Bit for bit, with 2 ranks: with more, the ring sums the dense vectors in an order of the bucket's."""
    for many, one, plain in pool.run(2, both_ways):
        assert torch.equal(many, one)
        assert torch.equal(many, plain)


@pytest.mark.parametrize("spec", METHODS[:2])
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("spec", METHODS[:2])
def test_inf_in_the_last_bucket_skips_the_step(pool, spec, when):
    for each in pool.run(2, overflow, spec, when):
        assert each.moved == [step != when for step in range(4)]
        assert each.scale == 512.0 and each.agreed
