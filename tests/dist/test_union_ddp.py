"""DEFT, MiCRO and ExDyna in real processes over gloo, on many buckets that DDP regroups."""

from __future__ import annotations

import pytest
import torch

from tests.dist.ddp_world import MANY, stop_and_go
from tests.dist.nets import train
from tests.dist.test_low_bits_ddp import overflow

METHODS = ("deft(density=0.05)", "micro(density=0.05)", "exdyna(density=0.05)")


def many(spec):
    return train(spec, **MANY)


def both_ways(spec):
    return train(spec)[0], many(spec)[0]


@pytest.mark.parametrize("spec", METHODS[1:])
def test_buckets_do_not_matter(pool, spec):
    """Bit for bit, with 2 ranks: with more, the ring sums in an order of the bucket's."""
    for whole, cut in pool.run(2, both_ways, spec):
        assert torch.equal(whole, cut)


@pytest.mark.parametrize("spec", METHODS[1:])
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    """Of DEFT only where DDP cuts the same buckets again, which it does not: its unit is the bucket."""
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("spec", METHODS)
def test_inf_in_the_last_bucket_skips_the_step(pool, spec, when):
    for each in pool.run(2, overflow, spec, when):
        assert each.moved == [step != when for step in range(4)]
        assert each.scale == 512.0 and each.agreed
