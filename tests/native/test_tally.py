"""Sums of packed levels, and their values: against plain loops, and the same bits on every target."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch

from laconic import kernels
from laconic.core.layout import Segments
from laconic.kernels import Form
from tests.cases import over

from .targets import agree, integers, normal, refused

SIZES = (0, 1, 7, 8, 1023, 1024, 1025, 5000)
SEGMENTS = {
    "whole": Segments.whole(3001),
    "apart": Segments((5, 2000, 1500), (1030, 513, 1)),
    "empty": Segments((0, 3, 3), (3, 0, 2100)),
    "nothing": Segments((), ()),
}


@lru_cache(maxsize=512)
def packed(n, most, seed):
    rng = random.Random(f"{n} {most} {seed}")
    codes = [rng.choice((0, most, rng.randint(0, most))) for _ in range(n)]
    return codes, kernels.pack_bits(torch.tensor(codes, dtype=torch.int32), most.bit_length())


@over(ranks=(1, 2, 33), most=(1, 2, 14, 65534), n=SIZES)
def test_sums_are_those_of_plain_loops(ranks, most, n):
    bits, given = (ranks * most).bit_length(), [packed(n, most, rank) for rank in range(ranks)]
    expected = [sum(column) for column in zip(*(codes for codes, _ in given), strict=True)]
    sums = agree(lambda: kernels.packed_sum(torch.stack([wire for _, wire in given]), n, most))
    assert sums.numel() == -(-n * bits // 8)
    assert kernels.unpack_bits(sums, bits, n).tolist() == expected


FORMS = ((1, 1, 0), (1, 4, 0), (7, 3, 64), (100, 5, 1000), (32767, 2, 1))  # levels, ranks, block


@over(form=FORMS, segments=SEGMENTS)
def test_values_are_those_of_unpacked_levels(form, segments):
    levels, ranks, block = form
    codes, wire = packed(segments.numel, 2 * ranks * levels, 3)
    blocks = sum(min(n, 1) if not block else -(-n // block) for n in segments.sizes)
    scales, x, form = normal(blocks, 1).abs() * 10, normal(3100, 2), Form(levels, block)
    signed = integers(codes) - ranks * levels
    expected = agree(lambda: kernels.levels_add_(signed, scales, segments, x.clone(), form, -0.3))
    out = agree(lambda: kernels.packed_levels_add_(wire, scales, segments, x.clone(), form, -0.3, ranks))
    assert torch.equal(out, expected)


def test_damage_is_noticed():
    """A code that no level has, in the first block and the last; bits behind the last; a wrong length."""
    good, whole = packed(2050, 2, 0)[1], Segments.whole(2050)

    def add(wire, scales=1):
        return kernels.packed_levels_add_(wire, torch.ones(scales), whole, torch.zeros(2050), Form(1))

    for at, spoilt in ((0, 3), (512, 3), (512, 16)):
        bad = good.clone()
        bad[at] = bad[at] | spoilt
        match = r"the levels that rank 1 sent are damaged: not in 0\.\.2"
        refused(match, lambda b=bad: kernels.packed_sum(torch.stack([good, b]), 2050, 2))
        refused(r"the levels are damaged: not in 0\.\.2", lambda b=bad: add(b))
    short = good[None, :-1].contiguous()
    refused("fill 513 bytes, got 512", lambda: kernels.packed_sum(short, 2050, 2))
    refused("are 513 bytes", lambda: add(good[:-1]), lambda: add(good, 2))


def test_sums_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match=r"sums are in 1\.\.1073741823, got 2 ranks of integers up to 10{9}"):
        kernels.packed_sum(torch.zeros(2, 30, dtype=torch.uint8), 8, 10**9)
