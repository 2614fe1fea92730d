"""Codes of gaps and levels: the bytes spelt by hand, the same on every target; refusals; near the entropy."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.qsgd.level_codings import CODINGS
from laconic.core.layout import Segments
from laconic.kernels.entropy.bounds import rice_parameter, rice_parameters
from laconic.kernels.gap_widths.widths import best_widths
from tests.cases import over

from .targets import agree, bits_of, integers, refused, spelt, wire_of

FAR = 2**31 - 1
SEEDS = range(60)
Gaps = list[list[int]]


def some(seed: int) -> tuple[Tensor, Tensor, Segments]:
    """Return sets in up to five segments: spread, clustered, empty and full."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(seed % 2, 400, (seed % 6,), generator=rng).tolist()
    sets = []
    for n in sizes:
        chance = torch.rand(n, generator=rng) ** (1 + seed % 4)
        chance[n // 3 : n // 2] *= seed % 3
        sets.append((chance > (0.2, 0.9, 0.99, -1.0, 3.0, 0.5, 0.7)[seed % 7]).nonzero().flatten())
    counts = torch.tensor([part.numel() for part in sets], dtype=torch.int64)
    return torch.cat([torch.zeros(0), *sets]).int(), counts, Segments.consecutive(sizes)


def gaps_of(indices: Tensor, counts: Tensor) -> Gaps:
    lists = [part.tolist() for part in torch.split(indices, counts.tolist())] if counts.numel() else []
    return [[b - a - 1 for a, b in zip([-1, *part], part, strict=False)] for part in lists]


def rice_by_hand(gaps: Gaps, sizes: tuple[int, ...]) -> Tensor:
    low, unary = [], ""
    for part, n in zip(gaps, sizes, strict=True):
        r = rice_parameter(len(part), n)
        low.append(bits_of("".join(spelt(gap % 2**r, r) for gap in part)))
        unary += "".join("0" * (gap >> r) + "1" for gap in part)
    return torch.cat([*low, bits_of(unary)])


def delta_by_hand(gaps: Gaps, sizes: tuple[int, ...]) -> Tensor:
    wire = []
    for gap in (gap for part in gaps for gap in part):
        while gap >= 128:
            wire.append(gap % 128 + 128)
            gap //= 128
        wire.append(gap)
    return wire_of(*wire)


def gap_widths_by_hand(gaps: Gaps, sizes: tuple[int, ...]) -> Tensor:
    wires = [wire_of()]
    for part in (part for part in gaps if part):
        lengths = [gap.bit_length() for gap in part]
        widths = best_widths([lengths.count(length) for length in range(32)])
        flag_bits = len(widths).bit_length() - 1
        units = [next(u for u, width in enumerate(widths) if width >= length) for length in lengths]
        fields = [(flag_bits, 2), *((width, 5) for width in widths), *((unit, flag_bits) for unit in units)]
        fields += [(gap, widths[unit]) for gap, unit in zip(part, units, strict=True)]
        wires.append(bits_of("".join(spelt(*field) for field in fields)))
    return torch.cat(wires)


CODES = {
    name: (getattr(kernels, f"{name}_encode"), getattr(kernels, f"{name}_decode"), by_hand)
    for name, by_hand in (
        ("rice", rice_by_hand),
        ("delta", delta_by_hand),
        ("gap_widths", gap_widths_by_hand),
    )
}


@over(code=CODES, seed=SEEDS)
def test_gaps_as_spelt_by_hand(code: tuple, seed: int) -> None:
    (encode, decode, by_hand), (indices, counts, segments) = code, some(seed)
    wire = agree(lambda: encode(indices, counts, segments))
    assert torch.equal(wire, by_hand(gaps_of(indices, counts), segments.sizes))
    assert torch.equal(agree(lambda: decode(wire, counts, segments)), indices)


def entropy_bits(n: int, k: int) -> float:
    """Return log2 C(n, k)."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@over(density=(0.04, 0.01, 0.001))
def test_rice_is_within_two_percent_of_the_entropy_of_random_sets(density: float) -> None:
    n = 4_000_000
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(5)) < density
    indices = drawn.nonzero().flatten().int()
    k = indices.numel()
    wire = kernels.rice_encode(indices, torch.tensor([k]), Segments.whole(n))
    assert 8 * wire.numel() <= 1.02 * entropy_bits(n, k)


def test_the_rice_parameter_is_the_best_or_next_to_it() -> None:
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


def test_the_gap_widths_are_the_best_of_all() -> None:
    """Against every choice of 1, 2 or 4 widths, and of 8 among few lengths."""
    rng = torch.Generator().manual_seed(0)
    for trial in range(60):
        lengths = torch.randint(0, 5 + trial % 6, (1 + trial * 3,), generator=rng).tolist()
        longest = max(lengths)

        def bits(widths: tuple[int, ...], lengths: list[int] = lengths) -> int:
            fitting = sum(next(width for width in widths if width >= length) for length in lengths)
            return 2 + 5 * len(widths) + (len(widths).bit_length() - 1) * len(lengths) + fitting

        found = best_widths([lengths.count(length) for length in range(32)])
        tried = [
            (*rest, longest) for units in (1, 2, 4, 8) for rest in combinations(range(longest), units - 1)
        ]
        assert bits(found) == min(map(bits, tried))


def test_the_bound_of_gap_widths_is_reached_within_a_third() -> None:
    """One lone position needs its header and its gap; many random ones nearly the bound."""
    assert kernels.gap_widths_bound(1, 2**31) == (7 + 31 + 7) // 8
    n = 1_000_000
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.01).nonzero().flatten().int()
    wire = kernels.gap_widths_encode(indices, torch.tensor([indices.numel()]), Segments.whole(n))
    bound = kernels.gap_widths_bound(indices.numel(), n)
    assert 0.66 * bound <= wire.numel() <= bound


def test_ascending() -> None:
    segments, counts = Segments((0, 10), (10, 5)), torch.tensor([2, 1])
    assert agree(lambda: kernels.ascending(integers([0, 9, 4]), counts, segments))
    for bad in ([9, 0, 4], [0, 0, 4], [-1, 9, 4], [0, 10, 4], [0, 9, 5], [0, 9, -1]):
        assert not agree(lambda b=bad: kernels.ascending(integers(b), counts, segments)), bad


@over(encode=(kernels.rice_encode, kernels.delta_encode), bad=([3, 1], [1, 1], [0, 5], [-1, 2]))
def test_encoders_refuse_positions_that_do_not_ascend(encode, bad: list[int]) -> None:
    refused("ascend", lambda: encode(integers(bad), torch.tensor([2]), Segments.whole(5)), error=ValueError)


TWO = torch.tensor([2])
DAMAGED = (  # a decoder, the size of the only segment, wires of two gaps that no encoder makes
    (
        kernels.delta_decode,
        300,
        (
            [5],  # one gap only
            [5, 1, 1],
            [5, 129],  # the last byte says that more follow
            [5, 129, 0],  # a needless byte
            [5, 128, 128, 128, 128, 128, 1],  # more than five
            [5, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F],  # far outside
            [255, 1, 255, 1],  # 255 and 511 of 300
        ),
    ),
    (  # r = 1: one byte of low bits (two used), then unary
        kernels.rice_decode,
        8,
        (
            [],
            [0],  # no unary part
            [0, 1],  # one gap only
            [0, 0],
            [0, 13],  # three gaps
            [4, 9],  # a bit behind the low bits
            [0, 9, 0],  # goes on
            [0, 33],  # the second at 9 of 8
            [2, 17],  # the second at 8 of 8
        ),
    ),
)


def test_decoders_refuse_gaps_that_no_encoder_makes() -> None:
    good = agree(lambda: kernels.rice_decode(wire_of(0, 9), TWO, Segments.whole(8)))
    assert good.tolist() == [0, 5]
    for decode, n, wires in DAMAGED:
        calls = [lambda w=wire, d=decode, n=n: d(wire_of(*w), TWO, Segments.whole(n)) for wire in wires]
        refused(None, *calls)


def test_the_decoder_of_gap_widths_refuses_wires_that_no_encoder_makes() -> None:
    """Two positions of 8, gaps 0 and 4: [00 | 3 | 000 001]."""

    def decode(bits: str) -> Tensor:
        return kernels.gap_widths_decode(bits_of(bits), TWO, Segments.whole(8))

    assert agree(lambda: decode("00 11000 000 001")).tolist() == [0, 5]
    for bits, message in (
        ("", "ends before"),
        ("00 11000", "ends before"),  # no gaps
        ("11 00000", "ends before"),  # eight widths, and no room for them
        ("00 11000 000 111", "outside"),  # the second at 8 of 8
        ("00 11000 000 001 1", "must be zero"),
        ("00 11000 000 001 000 00000000", "goes on"),
        ("00 00100 0000 0010", "better widths"),  # in 4 bits, where 3 do
        ("10 00000 11000 01 001", "better widths"),  # two units, where one is less
    ):
        refused(message, lambda b=bits: decode(b))


@over(decode=(kernels.rice_decode, kernels.delta_decode))
def test_counts_are_checked_before_anything_is_made(decode) -> None:
    wire, ten = torch.zeros(64, dtype=torch.uint8), Segments.whole(10)
    for count in (-1, 11, 2**40, -(2**62)):
        refused("count", lambda c=count: decode(wire, torch.tensor([c]), ten))
    refused("one value a segment", lambda: decode(wire, torch.tensor([1, 1]), ten), error=ValueError)
    long = Segments.whole(2**31 + 1)
    refused("at most", lambda: decode(wire, torch.tensor([1]), long), error=ValueError)


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


def elias_by_hand(value: int) -> str:
    """Return the definition: a zero, before it the number, before that its length less one, down to 1."""
    code = "0"
    while value > 1:
        code = format(value, "b") + code
        value = len(format(value, "b")) - 1
    return code


def elias_wire(bits: str) -> Tensor:
    """Return a wire whose first bit is the highest of the first byte."""
    bits += "0" * (-len(bits) % 8)
    return wire_of(*(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)))


def magnitudes(seed: int) -> Tensor:
    """Return up to 200 values, small or of every size."""
    rng = torch.Generator().manual_seed(seed)
    k = int(torch.randint(0, 200, (1,), generator=rng))
    exponents = torch.rand(k, generator=rng, dtype=torch.float64) * (3, 12, 31)[seed % 3]
    return (2**exponents).long().clamp_(max=FAR).int()


def test_elias_codes_as_spelt_by_hand() -> None:
    assert {value: elias_by_hand(value) for value in TEXTBOOK} == TEXTBOOK
    extremes = integers([FAR, 1, 2**30, 65535, 65536, FAR])
    for values in (*map(magnitudes, range(30)), integers([]), extremes, integers(range(1, 5000))):
        wire = agree(lambda v=values: kernels.elias_encode(v))
        assert torch.equal(wire, elias_wire("".join(map(elias_by_hand, values.tolist()))))
        assert torch.equal(agree(lambda w=wire, v=values: kernels.elias_decode(w, len(v))), values)
    assert wire.numel() == math.ceil(sum(map(kernels.elias_length, range(1, 5000))) / 8)


def test_elias_refuses_values_below_one_and_wires_that_no_encoder_makes() -> None:
    for bad in (0, -1, -(2**31)):
        match = f"start at 1: .* got {bad}"
        refused(match, lambda b=bad: kernels.elias_encode(integers([3, b, 5])), error=ValueError)
    for count, bits in (
        (0, "0"),  # nothing, and yet a byte
        (1, ""),
        (1, "000000000"),  # a byte more
        (1, "01"),  # a bit behind the code
        (9, "0" * 8),  # nine codes of one bit each
        (1, "11111111"),  # 3, 15, and a group that goes on
        (1, "10" + "100" + "11111" + "1" + "0" * 40),  # 31, then a group of 32 bits
    ):
        refused(None, lambda c=count, b=bits: kernels.elias_decode(elias_wire(b), c))
    refused("hold 0 to 8 codes", lambda: kernels.elias_decode(elias_wire("0"), -1))


def levels_of(seed: int, most: int) -> tuple[Tensor, Segments]:
    """Return signed levels of up to five segments; all zero, few, or nearly all in use."""
    rng = torch.Generator().manual_seed(seed)
    segments = Segments.consecutive(torch.randint(0, 300, (seed % 6,), generator=rng).tolist())
    wide = torch.randn(segments.numel, generator=rng) * (seed % 4) * most / 4
    return wide.round().clamp(-most, most).int(), segments


@over(seed=range(30))
def test_split_and_join_by_hand(seed: int) -> None:
    levels, segments = levels_of(seed, 7)
    indices, counts, sizes, signs = agree(lambda: kernels.split_levels(levels, segments))
    parts = [part.tolist() for part in segments.views(levels)]
    nonzero = [(i, level) for part in parts for i, level in enumerate(part) if level]
    assert indices.tolist() == [i for i, _ in nonzero]
    assert counts.tolist() == [sum(level != 0 for level in part) for part in parts]
    assert sizes.tolist() == [abs(level) for _, level in nonzero]
    assert torch.equal(signs, kernels.pack_bits(integers(level < 0 for _, level in nonzero), 1))
    joined = agree(lambda: kernels.join_levels(indices, counts, sizes, signs, segments, 7))
    assert torch.equal(joined, levels)
    steps = agree(lambda: kernels.steps_of(indices, counts))
    places, sums = agree(lambda: kernels.places_of(steps, counts))
    assert torch.equal(places, indices)
    assert sums.tolist() == [max((i for i, level in enumerate(p) if level), default=-1) + 1 for p in parts]


def test_join_refuses_levels_that_split_cannot_give() -> None:
    one, whole = torch.tensor([1]), Segments.whole(4)

    def joined(magnitude: int, *signs: int) -> Tensor:
        return kernels.join_levels(integers([2]), one, integers([magnitude]), wire_of(*signs), whole, 7)

    for magnitude in (0, -1, 8, FAR, -(2**31)):
        refused(r"magnitudes in 1\.\.7", lambda m=magnitude: joined(m, 0))
    refused(None, lambda: joined(1, 2), lambda: joined(1), lambda: joined(1, 0, 0))
    far = agree(lambda: kernels.places_of(integers([FAR, FAR]), TWO))
    assert far[0].tolist() == [FAR - 1, FAR] and far[1].tolist() == [2 * FAR]


@over(coding=CODINGS, most=(1, 3, 7, 127, 32767), seed=range(12))
def test_level_codings_lose_nothing(coding, most: int, seed: int) -> None:
    levels, segments = levels_of(seed, most)
    wire = agree(lambda: coding.encode(levels, segments, most))
    assert torch.equal(agree(lambda: coding.decode(wire, segments, most)), levels)
    assert wire.numel() <= 4 + sum(coding.nbytes(size, most) for size in segments.sizes)
    if most > 1 and int(levels.abs().max() if levels.numel() else 0) == most:
        refused(None, lambda: coding.decode(wire, segments, most - 1))


def test_sums_beyond_a_place_are_cut_in_pieces() -> None:
    """70,000 magnitudes of 32,767 add up to more than 2^31."""
    levels, whole = torch.full((70_000,), -32767, dtype=torch.int32), Segments.whole(70_000)
    wire = CODINGS["rice"].encode(levels, whole, 32767)
    assert torch.equal(CODINGS["rice"].decode(wire, whole, 32767), levels)
    assert wire.numel() <= CODINGS["rice"].nbytes(70_000, 32767)


@over(share=(0.001, 0.01, 0.04, 0.1, 0.2))
def test_rice_of_one_level_is_within_three_percent_of_the_entropy(share: float) -> None:
    """The symbols are -1, 0 and 1, as they are drawn; n = 2 million."""
    n, rng = 2_000_000, torch.Generator().manual_seed(1)
    signs = 2 * torch.randint(0, 2, (n,), generator=rng) - 1
    levels = (torch.rand(n, generator=rng) < share).int() * signs.int()
    counts = torch.bincount(levels + 1, minlength=3).double()
    entropy = float(-(counts * (counts / n).log2()).nansum())
    wire = CODINGS["rice"].encode(levels, Segments.whole(n), 1)
    assert entropy <= 8 * wire.numel() <= 1.03 * entropy
