"""Quantisers: every target makes the reference's bytes, and the reference those of single numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import Form, Measure

ALL = list(kernels.runnable())
NATIVE = [name for name in ALL if name != "reference"]
BUFFERS = (
    Segments((), ()),
    Segments.whole(1),
    Segments((7, 3, 900, 2000), (0, 1, 700, 257)),
    Segments((2000, 0), (600, 1999)),
)
MOST = 3.4028234663852886e38


def data(n: int, seed: int = 0) -> Tensor:
    """Heavy-tailed, with zeros, -0.0, and a stretch of denormals."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3
    x[5:40] = 0
    x[40:60] = -0.0
    x[600:800] *= 1e-41
    return x


def rounded_by_hand(x: float, z: float, levels: int, grid: str, u: int) -> int:
    """The level of one element, by exact arithmetic on the float y = |x| inv."""
    if z == 0:
        return 0
    one = np.float32(65536 if grid == "powers" else 65536 * levels)
    enlarge = np.float32(2.0**100 if z < 2**-60 else 1)
    size, scale = np.float32(abs(x)) * enlarge, np.float32(z) * enlarge
    inv = one / scale
    if inv * scale < one:
        inv = np.nextafter(inv, np.float32(np.inf))
    a = Fraction(float(min(size * inv, one))) / 65536
    if grid == "uniform":
        low, step, level = Fraction(math.floor(a)), Fraction(1), math.floor(a)
    else:
        steps = [Fraction(0), *(Fraction(2) ** (j - levels) for j in range(1, levels + 1))]
        level = max(j for j, value in enumerate(steps) if value <= a)
        low, step = steps[level], (steps[level + 1] if level < levels else 2 * steps[level]) - steps[level]
    return level + (u < math.floor((a - low) / step * 2**24))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("grid", "levels"), [("uniform", 1), ("uniform", 7), ("uniform", 1000), ("powers", 5)]
)
def test_each_element_as_by_hand(name: str, grid: str, levels: int) -> None:
    x, block, key = data(700, 1), 100, 77
    dither = kernels.dither24(key, 700).tolist()
    with kernels.using(name):
        form = Form(levels, block, grid)
        scales, signed = kernels.quantise_levels(x, Segments.whole(700), [key], form)
        wire = kernels.quantise(x, Segments.whole(700), [key], form)
    expected = []
    for i, value in enumerate(x.tolist()):
        level = rounded_by_hand(value, float(scales[i // block]), levels, grid, dither[i])
        expected.append(math.copysign(1, value) * level)
    assert signed.tolist() == expected
    bits = 1 + levels.bit_length()
    whole = sum(
        (abs(int(level)) | (math.copysign(1, value) < 0) << (bits - 1)) << bits * i
        for i, (level, value) in enumerate(zip(expected, x.tolist(), strict=True))
    )
    head = scales.numpy().tobytes()
    assert bytes(wire.tolist()) == head + whole.to_bytes((700 * bits + 7) // 8, "little")


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("segments", BUFFERS)
@pytest.mark.parametrize(("grid", "levels"), [
    *(("uniform", levels) for levels in (1, 2, 7, 8, 127, 128, 255, 16383, 32767)),
    *(("powers", levels) for levels in (1, 2, 7, 8, 64, 127)),
])  # fmt: skip
def test_the_bytes_are_those_of_the_reference(name: str, segments: Segments, grid: str, levels: int) -> None:
    keys = [2**64 - 1 - i for i in range(len(segments))]
    for block, factor in ((0, 1.0), (1, 1.0), (100, 1e-41), (256, 1e-20), (512, 1e35), (10**6, 1.0)):
        x = (data(2700, levels) * factor).clamp(-MOST, MOST)
        form = Form(levels, block, grid)
        with kernels.using("reference"):
            wire = kernels.quantise(x, segments, keys, form)
            levelled = kernels.quantise_levels(x, segments, keys, form)
            added = kernels.dequantise_add_(wire, segments, torch.ones(2700), form, -0.3)
        with kernels.using(name):
            assert torch.equal(kernels.quantise(x, segments, keys, form), wire)
            again = kernels.quantise_levels(x, segments, keys, form)
            assert torch.equal(again[0], levelled[0]) and torch.equal(again[1], levelled[1])
            assert torch.equal(kernels.dequantise_add_(wire, segments, torch.ones(2700), form, -0.3), added)
            assert torch.equal(
                kernels.levels_add_(again[1], again[0], segments, torch.ones(2700), form, -0.3), added
            )


@pytest.mark.parametrize("name", ALL)
def test_the_last_eight_bits_of_the_dither_count(name: str) -> None:
    """A fraction of 2^-18 is rounded up where the dither is below 64, which 16 bits cannot tell."""
    n = 1 << 18 if name == "reference" else 1 << 22
    x = torch.full((n,), 2.0**-18)
    x[0] = 1.0
    with kernels.using(name):
        _, signed = kernels.quantise_levels(x, Segments.whole(n), [3], Form(1))
        up = kernels.dither24(3, n)[1:] < 64
    assert torch.equal(signed[1:] == 1, up)
    assert name == "reference" or int(up.sum()) >= 4


@pytest.mark.parametrize("name", ALL)
def test_norms(name: str) -> None:
    segments, x = Segments((7, 3, 900), (0, 1, 700)), data(2000, 3)
    parts = [x[3:4], *torch.split(x[900:1600], 99)]
    with kernels.using(name):
        assert kernels.norms(x, segments, block=99).tolist() == [float(part.abs().max()) for part in parts]
        for norm, exact in (
            ("l2", [math.sqrt(math.fsum(v * v for v in part.tolist())) for part in parts]),
            ("mean", [math.fsum(map(abs, part.tolist())) / len(part) for part in parts]),
        ):
            torch.testing.assert_close(
                kernels.norms(x, segments, Measure(norm), 99), torch.tensor(exact), rtol=1.2e-7, atol=0
            )
        assert kernels.norms(torch.full((9,), 3e38), Segments.whole(9), Measure("l2")).tolist() == [MOST]
        assert kernels.norms(x, Segments((), ()), block=5).numel() == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norms_show_what_is_not_finite(name: str, bad: float) -> None:
    for at in (0, 99, 299):
        x = torch.ones(300)
        x[at] = bad
        with kernels.using(name):
            for norm in ("max", "l2", "mean"):
                finite = torch.isfinite(kernels.norms(x, Segments.whole(300), Measure(norm), 100)).tolist()
                assert finite == [i != at // 100 for i in range(3)]
            assert not math.isfinite(kernels.norms(x, Segments.whole(300), Measure(clip=2.5)))


@pytest.mark.parametrize("name", ALL)
def test_clipped_norms(name: str) -> None:
    """clip * deviation, but neither above the largest nor below the root mean square."""
    x = data(3000, 4)
    x[2000:2100] = -0.37
    x[2500:2700] = 1000 + torch.arange(200) % 2 * 2**-13  # a mean of 1e7 deviations
    x[2800] = 1e-45  # and 99 zeros: a root mean square that no float holds
    x[2801:2900] = 0
    segments = Segments((0, 2000, 2500, 1, 2800), (1900, 100, 200, 0, 100))
    with kernels.using(name):
        limited = kernels.norms(x, segments, Measure(clip=2.5))
    exact = [2.5 * float(x[:1900].double().std(correction=0)), x[2000].abs(), 1000 + 2**-14, 1e-45]
    torch.testing.assert_close(limited, torch.tensor(exact), rtol=2.4e-7, atol=0)
    assert limited[1] == x[2000].abs() and limited[2] < x[2501]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nan_and_inf_are_refused(name: str, bad: float) -> None:
    segments = Segments((0, 100), (60, 300))
    for at in (100, 227, 399):
        x = torch.ones(400)
        x[99], x[at] = bad, bad  # the first lies between the tensors
        with kernels.using(name):
            for measure in (Measure(), Measure("l2"), Measure(clip=2.0), Measure(scales=torch.ones(2))):
                with pytest.raises(NonFiniteError, match=r"tensor 1 of the message \(300 elements\)"):
                    kernels.quantise(x, segments, [1, 2], Form(3), measure)
                with pytest.raises(NonFiniteError, match="tensor 1"):
                    kernels.quantise_levels(x, segments, [1, 2], Form(3), measure)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("levels", [1, 7, 10, 1000])
def test_the_largest_of_a_block_is_sent_as_it_is(name: str, levels: int) -> None:
    x = torch.rand(3000, generator=torch.Generator().manual_seed(levels)) * 2.0 ** torch.arange(
        -140, 160
    ).repeat(10)
    x = x.clamp(max=MOST)
    with kernels.using(name):
        for grid in ("uniform", "powers"):
            form = Form(min(levels, 127), 1, grid)
            wire = kernels.quantise(x, Segments.whole(3000), [5], form)
            back = kernels.dequantise_add_(wire, Segments.whole(3000), torch.zeros(3000), form)
            assert torch.equal(back, x)


@pytest.mark.parametrize("name", ALL)
def test_given_scales_cut_off_and_floors_leave_out(name: str) -> None:
    x = torch.tensor([5.0, -5.0, 0.4, -0.2, 3e38, 0.0, 1.0, -1.0])
    whole, scales, floors = Segments.whole(8), torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.0])
    with kernels.using(name):
        form, measure = Form(5, 4), Measure(scales=scales, floors=floors)
        made, signed = kernels.quantise_levels(x, whole, [1], form, measure)
        assert made.tolist() == [1.0, 0.0] and signed.tolist() == [5, -5, 2, 0, 0, 0, 0, 0]
        wire = kernels.quantise(x, whole, [1], form, measure)
        back = kernels.dequantise_add_(wire, whole, torch.zeros(8), form)
        assert back.tolist() == [1.0, -1.0, pytest.approx(0.4), 0.0, 0.0, 0.0, 0.0, 0.0]
        for name_of, wrong in (("scales", -scales), ("floors", torch.ones(3))):
            with pytest.raises(ValueError, match=name_of):
                kernels.quantise(x, whole, [1], form, Measure(**{name_of: wrong}))


@pytest.mark.parametrize("name", ALL)
def test_sums_of_levels_are_levels(name: str) -> None:
    segments, x = Segments((3, 400), (300, 40)), data(500, 6)
    scales = kernels.norms(x, segments, block=64)
    form = Form(9, 64)
    with kernels.using(name):
        many = [
            kernels.quantise_levels(x, segments, [k, k], form, Measure(scales=scales))[1] for k in range(40)
        ]
        whole = kernels.levels_add_(
            sum(many, torch.zeros_like(many[0])), scales, segments, torch.zeros(500), form
        )
        apart = torch.zeros(500)
        for signed in many:
            kernels.levels_add_(signed, scales, segments, apart, form)
    torch.testing.assert_close(whole, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_base_3_says_the_same(name: str) -> None:
    for segments in BUFFERS:
        x, keys = data(2700, 8), list(range(len(segments)))
        with kernels.using(name):
            two, three = (
                kernels.quantise(x, segments, keys, Form(1, packing=packing)) for packing in ("bits", "base3")
            )
            assert three.numel() == sum(4 * (n > 0) + (n + 4) // 5 for n in segments.sizes)
            plain = kernels.dequantise_add_(two, segments, torch.zeros(2700), Form(1))
            assert torch.equal(
                kernels.dequantise_add_(three, segments, torch.zeros(2700), Form(1, packing="base3")), plain
            )


@pytest.mark.parametrize("name", ALL)
def test_wires_that_no_encoder_makes_are_refused_before_a_write(name: str) -> None:
    n, form = 300, Form(9, 128)
    wire = kernels.quantise(data(n, 9), Segments.whole(n), [1], form)  # 3 scales, 5 bits a code
    damage = {
        "expected": [wire[:-1], torch.cat([wire, wire[:1]]), wire[:0]],
        "negative or not finite": [wire.clone() for _ in range(3)],
        "levels up to 9": [wire.clone()],
        "must be zero": [wire.clone()],
    }
    for bad, scale in zip(damage["negative or not finite"], (-1.0, math.nan, math.inf), strict=True):
        bad[4:8] = torch.tensor([scale]).view(torch.uint8)
    damage["levels up to 9"][0][100] = 255
    damage["must be zero"][0][-1] |= 128
    out = torch.ones(n)
    with kernels.using(name):
        for text, wires in damage.items():
            for bad in wires:
                with pytest.raises(WireError, match=text):
                    kernels.dequantise_add_(bad, Segments.whole(n), out, form)
        with pytest.raises(WireError, match="levels up to 9"):
            kernels.levels_add_(
                torch.tensor([10], dtype=torch.int32),
                torch.ones(1),
                Segments.whole(1),
                out,
                Form(9, grid="powers"),
            )
    assert bool((out == 1).all())


def test_options_are_checked() -> None:
    x, whole = torch.ones(3), Segments.whole(3)
    for options, text in (
        ({"levels": 0}, "levels must be a whole number in 1..32767"),
        ({"levels": 32768}, "got 32768"),
        ({"levels": 128, "grid": "powers"}, "1..127"),
        ({"levels": 7, "grid": "cubes"}, "grid must be 'uniform' or 'powers'"),
        ({"levels": 7, "block": -1}, "block must be"),
        ({"levels": 7, "packing": "base3"}, "levels=1"),
    ):
        with pytest.raises(ValueError, match=text):
            Form(**options)
    for options, text in (
        ({"norm": "l1"}, "norm must be 'max', 'l2' or 'mean'"),
        ({"norm": "l2", "clip": 1.0}, "clip must be"),
    ):
        with pytest.raises(ValueError, match=text):
            Measure(**options)
    with pytest.raises(ValueError, match="one key a segment"):
        kernels.quantise(x, whole, [], Form(1))
    with pytest.raises(WireError, match="got 2 and 1"):
        kernels.levels_add_(torch.zeros(2, dtype=torch.int32), torch.ones(1), whole, x, Form(1))
