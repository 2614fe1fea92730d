"""Quantisers: the same bits on every target, and those of exact arithmetic on single numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from laconic.kernels import Form, Measure
from tests.cases import over

from .targets import (
    BUFFERS,
    INF,
    LARGEST,
    NAN,
    agree,
    bytes_of,
    heavy,
    integers,
    keys_of,
    on_every_target,
    refused,
    spoilt,
)


def rounded_by_hand(x: float, z: float, levels: int, grid: str, u: int) -> int:
    """Return the level of one element, by exact arithmetic on the float y = |x| inv."""
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


@over(grid_levels=(("uniform", 1), ("uniform", 7), ("uniform", 1000), ("powers", 5)))
def test_each_element_as_by_hand(grid_levels: tuple[str, int]) -> None:
    x, block, key, whole, (grid, levels) = heavy(700, 1), 100, 77, Segments.whole(700), grid_levels
    form, dither = Form(levels, block, grid), kernels.dither24(key, 700).tolist()
    scales, signed = agree(lambda: kernels.quantise_levels(x, whole, [key], form))
    wire = agree(lambda: kernels.quantise(x, whole, [key], form))
    expected = [
        math.copysign(1, value) * rounded_by_hand(value, float(scales[i // block]), levels, grid, dither[i])
        for i, value in enumerate(x.tolist())
    ]
    assert signed.tolist() == expected
    bits = 1 + levels.bit_length()
    codes = sum(
        (abs(int(level)) | (math.copysign(1, value) < 0) << (bits - 1)) << bits * i
        for i, (level, value) in enumerate(zip(expected, x.tolist(), strict=True))
    )
    assert bytes(wire.tolist()) == scales.numpy().tobytes() + codes.to_bytes((700 * bits + 7) // 8, "little")


UNIFORM = [("uniform", levels) for levels in (1, 2, 7, 8, 127, 128, 255, 16383, 32767)]
POWERS = [("powers", levels) for levels in (1, 2, 7, 8, 64, 127)]
BLOCKS = ((0, 1.0), (1, 1.0), (100, 1e-41), (256, 1e-20), (512, 1e35), (10**6, 1.0))


@over(grid_levels=UNIFORM + POWERS, block_factor=BLOCKS, segments=BUFFERS)
def test_all_targets_agree(grid_levels, block_factor, segments: Segments) -> None:
    (grid, levels), (block, factor), keys = grid_levels, block_factor, keys_of(segments)
    n = segments.end + 9
    x, form = (heavy(n, levels) * factor).clamp(-LARGEST, LARGEST), Form(levels, block, grid)

    def quantised() -> list[Tensor]:
        wire = kernels.quantise(x, segments, keys, form)
        scales, signed = kernels.quantise_levels(x, segments, keys, form)
        added = kernels.dequantise_add_(wire, segments, torch.ones(n), form, -0.3)
        assert torch.equal(kernels.levels_add_(signed, scales, segments, torch.ones(n), form, -0.3), added)
        return [wire, scales, signed, added]

    agree(quantised)


@on_every_target
def test_the_last_eight_bits_of_the_dither_count(target: str) -> None:
    """A fraction of 2^-18 is rounded up where the dither is below 64, which 16 bits cannot tell."""
    n = 1 << 18 if target == "reference" else 1 << 21
    x = torch.full((n,), 2.0**-18)
    x[0] = 1.0
    _, signed = kernels.quantise_levels(x, Segments.whole(n), [3], Form(1))
    up = kernels.dither24(3, n)[1:] < 64
    assert torch.equal(signed[1:] == 1, up)
    assert target == "reference" or int(up.sum()) >= 4


@on_every_target
def test_norms(target: str) -> None:
    segments, x = Segments((7, 3, 900), (0, 1, 700)), heavy(2000, 3)
    parts = [x[3:4], *torch.split(x[900:1600], 99)]
    assert kernels.norms(x, segments, block=99).tolist() == [float(part.abs().max()) for part in parts]
    for norm, exact in (
        ("l2", [math.sqrt(math.fsum(v * v for v in part.tolist())) for part in parts]),
        ("mean", [math.fsum(map(abs, part.tolist())) / len(part) for part in parts]),
    ):
        found = kernels.norms(x, segments, Measure(norm), 99)
        torch.testing.assert_close(found, torch.tensor(exact), rtol=1.2e-7, atol=0)
    assert kernels.norms(torch.full((9,), 3e38), Segments.whole(9), Measure("l2")).tolist() == [LARGEST]
    assert kernels.norms(x, Segments((), ()), block=5).numel() == 0
    for at in (0, 99, 299):
        for bad in (INF, -INF, NAN):
            x = spoilt(300, at, bad)
            for norm in ("max", "l2", "mean"):
                found = kernels.norms(x, Segments.whole(300), Measure(norm), 100)
                assert found.isfinite().tolist() == [i != at // 100 for i in range(3)]
            assert not math.isfinite(kernels.norms(x, Segments.whole(300), Measure(clip=2.5)))


@on_every_target
def test_clipped_norms(target: str) -> None:
    """clip * deviation, but neither above the largest nor below the root mean square."""
    x = heavy(3000, 4)
    x[2000:2100] = -0.37
    x[2500:2700] = 1000 + torch.arange(200) % 2 * 2**-13  # a mean of 1e7 deviations
    x[2800] = 1e-45  # and 99 zeros: a root mean square that no float holds
    x[2801:2900] = 0
    segments = Segments((0, 2000, 2500, 1, 2800), (1900, 100, 200, 0, 100))
    limited = kernels.norms(x, segments, Measure(clip=2.5))
    exact = [2.5 * float(x[:1900].double().std(correction=0)), x[2000].abs(), 1000 + 2**-14, 1e-45]
    torch.testing.assert_close(limited, torch.tensor(exact), rtol=2.4e-7, atol=0)
    assert limited[1] == x[2000].abs() and limited[2] < x[2501]


@over(bad=(INF, NAN), at=(100, 227, 399))
def test_nan_and_inf_are_refused_under_every_measure(bad: float, at: int) -> None:
    segments, x = Segments((0, 100), (60, 300)), spoilt(400, at, bad)
    x[99] = bad  # between the tensors
    for measure in (Measure(), Measure("l2"), Measure(clip=2.0), Measure(scales=torch.ones(2))):
        refused(
            r"tensor 1 of the message \(300 elements\)",
            lambda m=measure: kernels.quantise(x, segments, [1, 2], Form(3), m),
            lambda m=measure: kernels.quantise_levels(x, segments, [1, 2], Form(3), m),
            error=NonFiniteError,
        )


@over(levels=(1, 7, 10, 1000), grid=("uniform", "powers"))
def test_the_largest_of_a_block_is_sent_as_it_is(levels: int, grid: str) -> None:
    powers = 2.0 ** torch.arange(-140, 160).repeat(10)
    x = (torch.rand(3000, generator=torch.Generator().manual_seed(levels)) * powers).clamp(max=LARGEST)
    form, whole = Form(min(levels, 127), 1, grid), Segments.whole(3000)
    wire = agree(lambda: kernels.quantise(x, whole, [5], form))
    assert torch.equal(agree(lambda: kernels.dequantise_add_(wire, whole, torch.zeros(3000), form)), x)


def test_given_scales_cut_off_and_floors_leave_out() -> None:
    x = torch.tensor([5.0, -5.0, 0.4, -0.2, 3e38, 0.0, 1.0, -1.0])
    whole, scales, floors = Segments.whole(8), torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.0])
    form, measure = Form(5, 4), Measure(scales=scales, floors=floors)
    made, signed = agree(lambda: kernels.quantise_levels(x, whole, [1], form, measure))
    assert made.tolist() == [1.0, 0.0] and signed.tolist() == [5, -5, 2, 0, 0, 0, 0, 0]
    wire = agree(lambda: kernels.quantise(x, whole, [1], form, measure))
    back = agree(lambda: kernels.dequantise_add_(wire, whole, torch.zeros(8), form))
    assert back.tolist() == [1.0, -1.0, pytest.approx(0.4), 0.0, 0.0, 0.0, 0.0, 0.0]
    for name, wrong in (("scales", Measure(scales=-scales)), ("floors", Measure(floors=torch.ones(3)))):
        refused(name, lambda m=wrong: kernels.quantise(x, whole, [1], form, m), error=ValueError)


def test_sums_of_levels_are_levels() -> None:
    segments, x, form = Segments((3, 400), (300, 40)), heavy(500, 6), Form(9, 64)
    scales = kernels.norms(x, segments, block=64)
    measure = Measure(scales=scales)
    many = [kernels.quantise_levels(x, segments, [k, k], form, measure)[1] for k in range(40)]
    apart = torch.zeros(500)
    for signed in many:
        kernels.levels_add_(signed, scales, segments, apart, form)
    total = sum(many, torch.zeros_like(many[0]))
    whole = agree(lambda: kernels.levels_add_(total, scales, segments, torch.zeros(500), form))
    torch.testing.assert_close(whole, apart, rtol=1e-5, atol=1e-6)


@over(segments=BUFFERS)
def test_base_3_has_the_same_values(segments: Segments) -> None:
    n, keys = segments.end + 9, keys_of(segments)

    def values(packing: str) -> tuple[Tensor, Tensor]:
        form = Form(1, packing=packing)
        wire = kernels.quantise(heavy(n, 8), segments, keys, form)
        return wire, kernels.dequantise_add_(wire, segments, torch.zeros(n), form)

    (_, plain), (wire, packed) = agree(lambda: values("bits")), agree(lambda: values("base3"))
    assert wire.numel() == sum(4 * (n > 0) + (n + 4) // 5 for n in segments.sizes)
    assert torch.equal(packed, plain)


def test_wires_that_no_encoder_makes_are_refused_before_a_write() -> None:
    n, form, whole, out = 300, Form(9, 128), Segments.whole(300), torch.ones(300)
    wire = kernels.quantise(heavy(n, 9), whole, [1], form)  # 3 scales, 5 bits a code
    unlevelled, padded = wire.clone(), wire.clone()
    unlevelled[100] = 255
    padded[-1] |= 128
    cases = [("expected", bad) for bad in (wire[:-1], torch.cat([wire, wire[:1]]), wire[:0])]
    cases += [("levels up to 9", unlevelled), ("must be zero", padded)]
    for scale in (-1.0, NAN, INF):
        cases.append(("negative or not finite", torch.cat([wire[:4], bytes_of(scale), wire[8:]])))
    for match, bad in cases:
        refused(match, lambda b=bad: kernels.dequantise_add_(b, whole, out, form))
    one, powers = (torch.ones(1), Segments.whole(1), out), Form(9, grid="powers")
    refused("levels must be in -9..9", lambda: kernels.levels_add_(integers([10]), *one, powers))
    assert bool((out == 1).all())


def test_options_are_checked() -> None:
    x, whole = torch.ones(3), Segments.whole(3)
    for match, call in (
        ("levels must be a whole number in 1..32767", lambda: Form(0)),
        ("got 32768", lambda: Form(32768)),
        ("1..127", lambda: Form(128, grid="powers")),
        ("grid must be 'uniform' or 'powers'", lambda: Form(7, grid="cubes")),
        ("block must be", lambda: Form(7, block=-1)),
        ("levels=1", lambda: Form(7, packing="base3")),
        ("norm must be 'max', 'l2' or 'mean'", lambda: Measure("l1")),
        ("clip must be", lambda: Measure("l2", clip=1.0)),
        ("one key a segment", lambda: kernels.quantise(x, whole, [], Form(1))),
        ("got 2 and 1", lambda: kernels.levels_add_(integers([0, 0]), x[:1], whole, x, Form(1))),
    ):
        with pytest.raises(ValueError, match=match):
            call()
