"""Elias omega codes and split levels: as spelt by hand, the same on every target, near the entropy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.qsgd.level_codings import CODINGS
from laconic.core.errors import WireError
from laconic.core.layout import Segments

ALL = list(kernels.runnable())
each_target = pytest.mark.parametrize("name", ALL)
LARGEST = 2**31 - 1
TEXTBOOK = {
    1: "0",
    2: "100",
    3: "110",
    4: "101000",
    7: "101110",
    8: "1110000",
    15: "1111110",
    16: "10100100000",
}


def spelt(value: int) -> str:
    """The definition: a zero, before it the number, before that its length less one, and so on to 1."""
    code = "0"
    while value > 1:
        code = format(value, "b") + code
        value = len(format(value, "b")) - 1
    return code


def to_bytes(bits: str) -> bytes:
    """The first character is the highest bit of the first byte."""
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[i : i + 8], 2) for i in range(0, len(padded), 8))


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wire_of(bits: str) -> Tensor:
    return torch.tensor(list(to_bytes(bits)), dtype=torch.uint8)


def some(seed: int) -> Tensor:
    """Up to 200 values, small or of every size."""
    rng = torch.Generator().manual_seed(seed)
    k = int(torch.randint(0, 200, (1,), generator=rng))
    exponents = torch.rand(k, generator=rng, dtype=torch.float64) * (3, 12, 31)[seed % 3]
    return (2**exponents).long().clamp_(max=LARGEST).int()


def test_the_spelling_is_the_textbooks() -> None:
    assert {value: spelt(value) for value in TEXTBOOK} == TEXTBOOK


@each_target
def test_codes_as_spelt_by_hand(name: str) -> None:
    lists = [some(seed) for seed in range(30)] + [ints([]), ints([LARGEST, 1, 2**30, 65535, 65536, LARGEST])]
    with kernels.using(name):
        for values in lists:
            wire = kernels.elias_encode(values)
            assert bytes(wire.tolist()) == to_bytes("".join(map(spelt, values.tolist())))
            assert torch.equal(kernels.elias_decode(wire, values.numel()), values)


@each_target
def test_every_short_code_and_its_length(name: str) -> None:
    values = torch.arange(1, 5000, dtype=torch.int32)
    with kernels.using(name):
        wire = kernels.elias_encode(values)
        assert torch.equal(kernels.elias_decode(wire, 4999), values)
    assert wire.numel() == math.ceil(sum(kernels.elias_length(value) for value in range(1, 5000)) / 8)


@each_target
def test_values_below_one_are_refused(name: str) -> None:
    with kernels.using(name):
        for bad in (0, -1, -(2**31)):
            with pytest.raises(ValueError, match=f"start at 1: .* got {bad}"):
                kernels.elias_encode(ints([3, bad, 5]))


@each_target
def test_decoder_refuses_what_no_encoder_makes(name: str) -> None:
    with kernels.using(name):
        for count, bits in (
            (0, "0"),  # nothing, and yet a byte
            (1, ""),
            (1, "0" + "0" * 8),  # a byte more
            (1, "01"),  # a bit behind the code
            (9, "0" * 8),  # nine codes of one bit each
            (1, "11111111"),  # 3, 15, and a group that goes on
            (1, "10" + "100" + "11111" + "1" + "0" * 40),  # 31, of which a group of 32 bits follows
        ):
            with pytest.raises(WireError):
                kernels.elias_decode(wire_of(bits), count)
        with pytest.raises(WireError, match="hold 0 to 8 codes"):
            kernels.elias_decode(wire_of("0"), -1)


def test_damaged_wires_are_refused_alike_or_are_what_an_encoder_makes() -> None:
    rng = torch.Generator().manual_seed(0)
    refused = 0
    for seed in range(150):
        values = some(seed)
        bad = kernels.elias_encode(values)
        if bad.numel():
            bad[int(torch.randint(0, bad.numel(), (1,), generator=rng))] ^= 1 << seed % 8
        got = []
        for name in ALL:
            with kernels.using(name):
                try:
                    got.append(kernels.elias_decode(bad[: bad.numel() - seed % 7 // 6], values.numel()))
                except WireError:
                    got.append(None)
        if got[0] is None:
            assert all(each is None for each in got)
            refused += 1
        else:
            assert all(each is not None and torch.equal(each, got[0]) for each in got)
            assert torch.equal(kernels.elias_encode(got[0]), bad)
    assert 20 < refused < 150


def levels_of(seed: int, most: int) -> tuple[Tensor, Segments]:
    """Signed levels of up to five segments; all zero, few, or nearly all in use."""
    rng = torch.Generator().manual_seed(seed)
    segments = Segments.consecutive(torch.randint(0, 300, (seed % 6,), generator=rng).tolist())
    wide = torch.randn(segments.numel, generator=rng) * (seed % 4) * most / 4
    return wide.round().clamp(-most, most).int(), segments


@each_target
def test_split_and_join_by_hand(name: str) -> None:
    with kernels.using(name):
        for seed in range(30):
            levels, segments = levels_of(seed, 7)
            indices, counts, magnitudes, signs = kernels.split_levels(levels, segments)
            parts = [part.tolist() for part in segments.views(levels)]
            kept = [(i, level) for part in parts for i, level in enumerate(part) if level]
            assert indices.tolist() == [i for i, _ in kept]
            assert counts.tolist() == [sum(level != 0 for level in part) for part in parts]
            assert magnitudes.tolist() == [abs(level) for _, level in kept]
            assert torch.equal(signs, kernels.pack_bits(ints([int(level < 0) for _, level in kept]), 1))
            assert torch.equal(kernels.join_levels(indices, counts, magnitudes, signs, segments, 7), levels)
            steps = kernels.steps_of(indices, counts)
            places, sums = kernels.places_of(steps, counts)
            assert torch.equal(places, indices)
            ends = [max((i for i, level in enumerate(part) if level), default=-1) + 1 for part in parts]
            assert sums.tolist() == ends


@each_target
def test_join_refuses_what_split_cannot_give(name: str) -> None:
    one, whole, nothing = torch.tensor([1]), Segments.whole(4), torch.tensor([0], dtype=torch.uint8)
    with kernels.using(name):
        for magnitude in (0, -1, 8, LARGEST, -(2**31)):
            with pytest.raises(WireError, match=r"magnitudes in 1\.\.7"):
                kernels.join_levels(ints([2]), one, ints([magnitude]), nothing, whole, 7)
        for signs in ([2], [], [0, 0]):
            with pytest.raises(WireError):
                kernels.join_levels(
                    ints([2]), one, ints([1]), torch.tensor(signs, dtype=torch.uint8), whole, 7
                )
        far = kernels.places_of(ints([LARGEST, LARGEST]), torch.tensor([2]))
        assert far[0].tolist() == [LARGEST - 1, LARGEST] and far[1].tolist() == [2 * LARGEST]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("most", [1, 3, 7, 127, 32767])
def test_level_codings_lose_nothing(coding: str, most: int) -> None:
    code = CODINGS[coding]
    for seed in range(12):
        levels, segments = levels_of(seed, most)
        wires = []
        for name in ALL:
            with kernels.using(name):
                wires.append(code.encode(levels, segments, most))
                assert torch.equal(code.decode(wires[-1], segments, most), levels)
        assert all(torch.equal(wire, wires[0]) for wire in wires)
        assert wires[0].numel() <= 4 + sum(code.nbytes(size, most) for size in segments.sizes)
        if most > 1 and int(levels.abs().max() if levels.numel() else 0) == most:
            with pytest.raises(WireError):
                code.decode(wires[0], segments, most - 1)


def test_sums_beyond_a_place_are_cut_in_pieces() -> None:
    """70,000 magnitudes of 32,767 add up to more than 2^31."""
    levels, whole = torch.full((70_000,), -32767, dtype=torch.int32), Segments.whole(70_000)
    wire = CODINGS["rice"].encode(levels, whole, 32767)
    assert torch.equal(CODINGS["rice"].decode(wire, whole, 32767), levels)
    assert wire.numel() <= CODINGS["rice"].nbytes(70_000, 32767)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.04, 0.1, 0.2])
def test_rice_of_one_level_is_within_three_percent_of_the_entropy(share: float) -> None:
    """Of its symbols -1, 0 and 1, as they are drawn, n = 4 million."""
    n, rng = 4_000_000, torch.Generator().manual_seed(1)
    levels = (torch.rand(n, generator=rng) < share).int() * (
        2 * torch.randint(0, 2, (n,), generator=rng) - 1
    ).int()
    counts = torch.bincount(levels + 1, minlength=3).double()
    entropy = float(-(counts * (counts / n).log2()).nansum())
    wire = CODINGS["rice"].encode(levels, Segments.whole(n), 1)
    assert entropy <= 8 * wire.numel() <= 1.03 * entropy
