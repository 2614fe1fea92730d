"""Codes of gaps: the same bytes on every target, against codes spelt bit by bit; near the entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.entropy.bounds import rice_parameter, rice_parameters

ALL = list(kernels.runnable())


def some(seed: int) -> tuple[Tensor, Tensor, Segments]:
    """Random sets in up to five segments of up to 300 elements; empty and full ones too."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 300, (int(torch.randint(0, 6, (1,), generator=rng)),), generator=rng).tolist()
    counts = [(0, n, int(torch.randint(0, n + 1, (1,), generator=rng)))[min(seed % 5, 2)] for n in sizes]
    sets = [torch.randperm(n, generator=rng)[:k].sort().values for k, n in zip(counts, sizes, strict=True)]
    indices = torch.cat([torch.zeros(0, dtype=torch.int64), *sets]).to(torch.int32)
    return indices, torch.tensor(counts, dtype=torch.int64), Segments.consecutive(sizes)


def gaps_by_hand(indices: Tensor, counts: Tensor) -> list[list[int]]:
    lists = [part.tolist() for part in torch.split(indices, counts.tolist())] if counts.numel() else []
    return [[b - a - 1 for a, b in zip([-1, *part], part, strict=False)] for part in lists]


def bits_to_bytes(bits: str) -> bytes:
    """The first character is the lowest bit of the first byte."""
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[i : i + 8][::-1], 2) for i in range(0, len(padded), 8))


def rice_by_hand(indices: Tensor, counts: Tensor, segments: Segments) -> bytes:
    low, unary = b"", ""
    for gaps, n in zip(gaps_by_hand(indices, counts), segments.sizes, strict=True):
        r = rice_parameter(len(gaps), n)
        low += bits_to_bytes("".join(format(gap % 2**r, f"0{r}b")[::-1] for gap in gaps) if r else "")
        unary += "".join("0" * (gap >> r) + "1" for gap in gaps)
    return low + bits_to_bytes(unary)


def delta_by_hand(indices: Tensor, counts: Tensor) -> bytes:
    wire = bytearray()
    for gap in (gap for gaps in gaps_by_hand(indices, counts) for gap in gaps):
        while gap >= 128:
            wire.append(gap % 128 + 128)
            gap //= 128
        wire.append(gap)
    return bytes(wire)


@pytest.mark.parametrize("name", ALL)
def test_both_codes_as_spelt_by_hand(name: str) -> None:
    with kernels.using(name):
        for seed in range(100):
            indices, counts, segments = some(seed)
            rice = kernels.rice_encode(indices, counts, segments)
            assert bytes(rice.tolist()) == rice_by_hand(indices, counts, segments)
            assert torch.equal(kernels.rice_decode(rice, counts, segments), indices)
            delta = kernels.delta_encode(indices, counts, segments)
            assert bytes(delta.tolist()) == delta_by_hand(indices, counts)
            assert torch.equal(kernels.delta_decode(delta, counts, segments), indices)


def entropy_bits(n: int, k: int) -> float:
    """log2 C(n, k)"""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@pytest.mark.parametrize("density", [0.04, 0.01, 0.001])
def test_rice_is_within_two_percent_of_what_random_sets_hold(density: float) -> None:
    n = 10_000_000
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(5)) < density
    indices = drawn.nonzero().flatten().to(torch.int32)
    k = indices.numel()
    wire = kernels.rice_encode(indices, torch.tensor([k]), Segments.whole(n))
    assert 8 * wire.numel() <= 1.02 * entropy_bits(n, k)


def test_the_parameter_is_the_best_or_next_to_it() -> None:
    """Against every other r, on the mean of a geometric gap: never more than 1 % longer."""
    for k in (1, 3, 10, 40, 100, 300, 618, 900, 1000):
        n = 1000 if k > 100 else 100_000

        def cost(r: int, k: int = k, n: int = n) -> float:
            stay = (1 - k / n) ** 2**r
            return r + 1 + stay / (1 - stay) if stay < 1 else math.inf

        assert cost(rice_parameter(k, n)) <= 1.01 * min(cost(r) for r in range(25)), k


def test_the_parameters_of_many_segments_are_those_of_each() -> None:
    shapes = [(k, n) for n in (0, 1, 2, 3, 17, 1000, 2**31) for k in (0, 1, 2, 3, 16, 700, 2**30) if k <= n]
    counts, sizes = (np.array(column) for column in zip(*shapes, strict=True))
    assert rice_parameters(counts, sizes).tolist() == [rice_parameter(k, n) for k, n in shapes]


@pytest.mark.parametrize("name", ALL)
def test_ascending(name: str) -> None:
    segments, good = Segments((0, 10), (10, 5)), [0, 9, 4]
    with kernels.using(name):
        assert kernels.ascending(torch.tensor(good, dtype=torch.int32), torch.tensor([2, 1]), segments)
        for bad in ([9, 0, 4], [0, 0, 4], [-1, 9, 4], [0, 10, 4], [0, 9, 5], [0, 9, -1]):
            assert not kernels.ascending(torch.tensor(bad, dtype=torch.int32), torch.tensor([2, 1]), segments)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("encode", [kernels.rice_encode, kernels.delta_encode])
def test_encoders_refuse_what_does_not_ascend(name: str, encode: object) -> None:
    assert callable(encode)
    with kernels.using(name):
        for bad in ([3, 1], [1, 1], [0, 5], [-1, 2]):
            with pytest.raises(ValueError, match="ascend"):
                encode(torch.tensor(bad, dtype=torch.int32), torch.tensor([2]), Segments.whole(5))


@pytest.mark.parametrize("name", ALL)
def test_decoders_refuse_what_no_encoder_makes(name: str) -> None:
    whole, two = Segments.whole(300), torch.tensor([2])

    def refused(decode: object, wire: list[int], segments: Segments = whole) -> None:
        assert callable(decode)
        with pytest.raises(WireError):
            decode(torch.tensor(wire, dtype=torch.uint8), two, segments)

    with kernels.using(name):
        refused(kernels.delta_decode, [5])  # one gap only
        refused(kernels.delta_decode, [5, 1, 1])  # three
        refused(kernels.delta_decode, [5, 129])  # the last byte says that more follow
        refused(kernels.delta_decode, [5, 129, 0])  # a needless byte
        refused(kernels.delta_decode, [5, 128, 128, 128, 128, 128, 1])  # more than five
        refused(kernels.delta_decode, [5, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F])  # far outside
        refused(kernels.delta_decode, [255, 1, 255, 1])  # 255 and 511 of 300
        # two of 8: r = 1, so one byte of low bits (two used), then unary
        assert kernels.rice_decode(
            torch.tensor([0, 9], dtype=torch.uint8), two, Segments.whole(8)
        ).tolist() == [0, 5]
        eight = Segments.whole(8)
        refused(kernels.rice_decode, [], eight)
        refused(kernels.rice_decode, [0], eight)  # no unary part
        refused(kernels.rice_decode, [0, 1], eight)  # one gap only
        refused(kernels.rice_decode, [0, 0], eight)
        refused(kernels.rice_decode, [0, 13], eight)  # three gaps
        refused(kernels.rice_decode, [4, 9], eight)  # a bit behind the low bits
        refused(kernels.rice_decode, [0, 9, 0], eight)  # goes on
        refused(kernels.rice_decode, [0, 33], eight)  # the second at 9 of 8
        refused(kernels.rice_decode, [2, 17], eight)  # the second at 8 of 8


@pytest.mark.parametrize("name", ALL)
def test_counts_are_checked_before_anything_is_made(name: str) -> None:
    wire = torch.zeros(64, dtype=torch.uint8)
    with kernels.using(name):
        for decode in (kernels.rice_decode, kernels.delta_decode):
            for counts in ([-1], [11], [2**40], [-(2**62)]):
                with pytest.raises(WireError, match="count"):
                    decode(wire, torch.tensor(counts), Segments.whole(10))
            with pytest.raises(ValueError, match="one value a segment"):
                decode(wire, torch.tensor([1, 1]), Segments.whole(10))
            with pytest.raises(ValueError, match="at most"):
                decode(wire, torch.tensor([1]), Segments.whole(2**31 + 1))
