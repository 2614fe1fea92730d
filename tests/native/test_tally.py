"""Sums of packed levels, and their values: against plain loops, and the same bits on every target."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import Form

SIZES = (0, 1, 7, 8, 1023, 1024, 1025, 5000)
SEGMENTS = {
    "whole": Segments.whole(3001),
    "apart": Segments((5, 2000, 1500), (1030, 513, 1)),
    "empty": Segments((0, 3, 3), (3, 0, 2100)),
    "nothing": Segments((), ()),
}
targets = pytest.mark.parametrize("target", kernels.runnable())


@lru_cache(maxsize=512)
def packed(n, most, seed):
    rng = random.Random(f"{n} {most} {seed}")
    codes = [rng.choice((0, most, rng.randint(0, most))) for _ in range(n)]
    return codes, kernels.pack_bits(torch.tensor(codes, dtype=torch.int32), most.bit_length())


@targets
@pytest.mark.parametrize("ranks", [1, 2, 33])
@pytest.mark.parametrize("most", [1, 2, 14, 65534])
def test_sums_are_those_of_plain_loops(target, most, ranks):
    bits = (ranks * most).bit_length()
    for n in SIZES:
        given = [packed(n, most, rank) for rank in range(ranks)]
        expected = [sum(column) for column in zip(*(codes for codes, _ in given), strict=True)]
        with kernels.using(target):
            sums = kernels.packed_sum(torch.stack([wire for _, wire in given]), n, most)
        assert sums.numel() == -(-n * bits // 8)
        assert kernels.unpack_bits(sums, bits, n).tolist() == expected, n


@targets
@pytest.mark.parametrize(
    "levels, ranks, block", [(1, 1, 0), (1, 4, 0), (7, 3, 64), (100, 5, 1000), (32767, 2, 1)]
)
@pytest.mark.parametrize("where", SEGMENTS)
def test_values_are_those_of_unpacked_levels(target, where, levels, ranks, block):
    segments, zero = SEGMENTS[where], ranks * levels
    codes, wire = packed(segments.numel, 2 * zero, 3)
    blocks = sum(min(n, 1) if not block else -(-n // block) for n in segments.sizes)
    scales = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) * 10
    x = torch.randn(3100, generator=torch.Generator().manual_seed(2))
    with kernels.using("reference"):
        signed = torch.tensor(codes, dtype=torch.int32) - zero
        expected = kernels.levels_add_(signed, scales, segments, x.clone(), Form(levels, block), -0.3)
    with kernels.using(target):
        out = kernels.packed_levels_add_(wire, scales, segments, x.clone(), Form(levels, block), -0.3, ranks)
    assert torch.equal(out, expected)


@targets
def test_damage_is_noticed(target):
    """A code that no level has, in the first block and the last; bits behind the last; a wrong length."""
    good = packed(2050, 2, 0)[1]
    with kernels.using(target):
        for at, spoilt in ((0, 3), (512, 3), (512, 16)):
            bad = good.clone()
            bad[at] = bad[at] | spoilt
            with pytest.raises(WireError, match=r"the levels that rank 1 sent are damaged: not in 0\.\.2"):
                kernels.packed_sum(torch.stack([good, bad]), 2050, 2)
            with pytest.raises(WireError, match=r"the levels are damaged: not in 0\.\.2"):
                kernels.packed_levels_add_(
                    bad, torch.ones(1), Segments.whole(2050), torch.zeros(2050), Form(1)
                )
        with pytest.raises(WireError, match="fill 513 bytes, got 512"):
            kernels.packed_sum(good[None, :-1].contiguous(), 2050, 2)
        for wire, scales in ((good[:-1], 1), (good, 2)):
            with pytest.raises(WireError, match="are 513 bytes"):
                kernels.packed_levels_add_(
                    wire, torch.ones(scales), Segments.whole(2050), torch.zeros(2050), Form(1)
                )


def test_sums_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match=r"sums are in 1\.\.1073741823, got 2 ranks of integers up to 10{9}"):
        kernels.packed_sum(torch.zeros(2, 30, dtype=torch.uint8), 8, 10**9)
