"""Quantisers in Triton: the bytes of the reference, in the interpreter; and what they compile to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import Form, Measure
from laconic.kernels.quantise import (
    decode_kernels,
    encode_kernels,
    gpu,
    norm_kernels,
    packed_sums,
    plan,
    reference,
)
from tests.triton.offline import Kernel, check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which is numpy

MOST = 3.4028234663852886e38
SEGMENTS = {
    "one": Segments.whole(1),
    "few": Segments((3, 11, 60), (7, 40, 511)),
    "around a tile": Segments((1, 4097, 9000, 14000, 14001), (4095, 4096, 4097, 0, 513)),
    "aligned": Segments((0, 512, 8704), (512, 8192, 64)),
}
FORMS = [
    Form(7, 512), Form(1, 0), Form(1, 32), Form(2, 4096), Form(7, 0), Form(127, 64), Form(255, 128),
    Form(1000, 256), Form(32767, 1024), Form(7, 512, "powers"), Form(3, 0, "powers"), Form(127, 64, "powers"),
    Form(5, 40), Form(30, 5000), Form(1, 0, packing="base3"), Form(1, 512, packing="base3"),
]  # fmt: skip


def inputs(n: int) -> dict[str, Tensor]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) ** 3
    mixed = x.clone()
    mixed[5:40] = 0
    mixed[40:60] = -0.0
    mixed[600:800] *= 1e-41
    return {
        "mixed": mixed,
        "zeros": torch.zeros(n),
        "constant": torch.full((n,), -0.37),
        "denormal": x * 1e-41,
        "huge": (x * 1e38).clamp(-MOST, MOST),
    }


def keys_of(segments: Segments) -> list[int]:
    return [2**64 - 1 - 77 * i for i in range(len(segments))]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("where", SEGMENTS)
def test_the_bytes_are_those_of_the_reference(where: str, form: Form) -> None:
    segments = SEGMENTS[where]
    keys, few = keys_of(segments), form in FORMS[:2]
    for name, x in inputs(15000).items():
        if not few and name not in ("mixed", "denormal"):
            continue
        wire = reference.quantise(x, segments, keys, form, Measure())
        assert torch.equal(gpu.quantise(x, segments, keys, form, Measure()), wire), name
        scales, levels = reference.quantise_levels(x, segments, keys, form, Measure())
        made = gpu.quantise_levels(x, segments, keys, form, Measure())
        assert torch.equal(made[0], scales) and torch.equal(made[1], levels), name
        expected = reference.dequantise_add_(wire, segments, x.clone(), form, -0.3)
        expected = reference.dequantise_add_(wire, segments, expected, form, -0.3)
        out = gpu.dequantise_messages_add_([wire, wire.clone()], segments, x.clone(), form, -0.3)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), name
        expected = reference.levels_add_(levels, scales, segments, x.clone(), form, 0.7)
        out = gpu.levels_add_(levels, scales, segments, x.clone(), form, 0.7)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), name


@pytest.mark.parametrize("form", [Form(1), Form(7, 512), Form(7, 512, "powers"), Form(127)], ids=str)
def test_ties_are_broken_by_the_last_eight_bits(form: Form) -> None:
    """Each element has the 16 bits of its dither as its fraction, and other bits behind them."""
    n, key, fine = 8192 + 100, 0xFEDCBA9876543210, 77
    upper = kernels.dither24(key, n) >> 8
    y = (upper.double() * 256 + torch.arange(n) * 37 % 256) / 2**24
    if form.powers:
        y = 2.0**-3 * (1 + y)
    x = (y / (1 if form.powers else form.levels)).float()
    x[:: form.block or n] = 1.0
    _, levels = reference.quantise_levels(x, Segments.whole(n), [key], form, Measure())
    _, made = gpu.quantise_levels(x, Segments.whole(n), [key], form, Measure())
    assert torch.equal(made, levels)
    assert not torch.equal(
        levels, reference.quantise_levels(x, Segments.whole(n), [key + fine], form, Measure())[1]
    )


def test_norms() -> None:
    for segments in (*SEGMENTS.values(), Segments((3,), (9000,))):
        for x in inputs(15000).values():
            for block in (0, 512):
                for measure in (
                    Measure(),
                    Measure("l2"),
                    Measure("mean"),
                    *([Measure(clip=2.5)] * (not block)),
                ):
                    found = gpu.norms(x, segments, Form(1, block), measure)
                    expected = reference.norms(x, segments, Form(1, block), measure)
                    if measure == Measure():
                        assert torch.equal(found, expected)
                    torch.testing.assert_close(found, expected, rtol=1.2e-7, atol=1.5e-45)


def test_given_scales_cut_off() -> None:
    segments, form = SEGMENTS["around a tile"], Form(5)
    x, scales = inputs(15000)["mixed"], torch.tensor([0.5, 0.0, 1e-30, 2.0])
    measure = Measure(scales=scales)
    for block in (0, 512):
        form = Form(5, block)
        scales = torch.rand(form.blocks(segments)) * (torch.arange(form.blocks(segments)) % 3)
        measure = Measure(scales=scales)
        assert torch.equal(
            gpu.quantise_levels(x, segments, [1, 2, 3, 4, 5], form, measure)[1],
            reference.quantise_levels(x, segments, [1, 2, 3, 4, 5], form, measure)[1],
        )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nan_and_inf_are_refused(bad: float) -> None:
    segments = Segments((0, 100), (60, 5000))
    for at in (100, 227, 5099):
        x = torch.ones(6000)
        x[99], x[at] = bad, bad
        for form in (Form(3), Form(3, 512)):
            for measure in (Measure(), Measure("l2"), Measure(scales=torch.ones(form.blocks(segments)))):
                with pytest.raises(NonFiniteError, match="tensor 1 of the message"):
                    gpu.quantise(x, segments, [1, 2], form, measure)


def test_a_damaged_message_is_named_and_not_added() -> None:
    n, form = 5000, Form(9, 128)
    wire = reference.quantise(inputs(n)["mixed"], Segments.whole(n), [1], form, Measure())
    damage = {
        "negative or not finite": (7, 255),
        "levels up to 9": (300, 255),
        "must be zero": (wire.numel() - 1, 255),
    }
    if n * form.bits % 8 == 0:
        del damage["must be zero"]
    for text, (at, byte) in damage.items():
        bad = wire.clone()
        bad[at] = byte
        out = torch.ones(n)
        with pytest.raises(WireError, match=text) as caught:
            gpu.dequantise_messages_add_([wire, bad, wire], Segments.whole(n), out, form, 1.0)
        assert caught.value.message == 1
        twice = torch.ones(n)
        for _ in range(2):
            reference.dequantise_add_(wire, Segments.whole(n), twice, form, 1.0)
        assert torch.equal(out, twice)


@pytest.mark.parametrize("block", [0, 512])
def test_a_damaged_message_in_base_3(block: int) -> None:
    n, form = 6003, Form(1, block, packing="base3")
    wire = reference.quantise(inputs(n)["mixed"], Segments.whole(n), [1], form, Measure())
    for at, text in ((3, "not finite"), (700, "at most 242"), (-1, "must be zero")):
        bad, out = wire.clone(), torch.ones(n)
        bad[at] = 255 if at > 0 else 27
        with pytest.raises(WireError, match=text):
            gpu.dequantise_messages_add_([bad], Segments.whole(n), out, form, 1.0)
        assert torch.equal(out, torch.ones(n))


@pytest.mark.parametrize(("most", "ranks"), [(2, 8), (14, 3), (200, 2), (1, 1)])
def test_packed_sums(most: int, ranks: int) -> None:
    for n in (0, 1, 7, 4095, 4097, 9001):
        codes = torch.randint(0, most + 1, (ranks, n), generator=torch.Generator().manual_seed(n))
        bits, sum_bits = most.bit_length(), (ranks * most).bit_length()
        wires = torch.stack([kernels.pack_bits(row.int(), bits) for row in codes])
        sums, flags = packed_sums.packed_sum(wires, n, most, bits, sum_bits)
        assert torch.equal(sums, kernels.pack_bits(codes.sum(0).int(), sum_bits)) and not flags.any()
        if n:
            wires[-1, -1] = 255
            flags = packed_sums.packed_sum(wires, n, most, bits, sum_bits)[1]
            fits = most & most + 1 == 0 and n * bits % 8 == 0
            assert flags.tolist() == [0] * (ranks - 1) + [0 if fits else 1]


@pytest.mark.parametrize(("levels", "ranks", "block"), [(1, 8, 0), (7, 3, 64), (100, 5, 1000)])
def test_values_of_packed_sums(levels: int, ranks: int, block: int) -> None:
    segments, zero, form = SEGMENTS["around a tile"], ranks * levels, Form(levels, block)
    bits = (2 * zero).bit_length()
    codes = torch.randint(0, 2 * zero + 1, (segments.numel,), dtype=torch.int32)
    scales, x = torch.rand(form.blocks(segments)), torch.randn(15000)
    expected = reference.levels_add_(codes - zero, scales, segments, x.clone(), form, -0.3)
    flags = torch.zeros(1, dtype=torch.int32)
    wire = kernels.pack_bits(codes, bits)
    out = packed_sums.add_levels_(wire, bits, zero, scales, flags, segments, x.clone(), form, -0.3)
    assert torch.equal(out, expected) and not flags.any()
    expected = reference.levels_add_(codes - zero, scales, segments, segments.zero_(x.clone()), form, -0.3)
    out = packed_sums.add_levels_(wire, bits, zero, scales, flags, segments, x.clone(), form, -0.3, True)
    assert torch.equal(out, expected)
    assert torch.equal(packed_sums.pack_levels(codes - zero, zero, bits), wire)
    if segments.numel * bits % 8:
        wire[-1] |= 128
        packed_sums.add_levels_(wire, bits, zero, scales, flags, segments, x, form, -0.3)
        assert flags.any()


@pytest.mark.parametrize("levels", [1, 2, 3, 7, 9, 30, 127, 1000, 4095])
def test_factors_divide_by_the_number_of_levels(levels: int) -> None:
    for most in (levels, 8 * levels):
        high, low = plan.inverse(levels, most)
        k = torch.arange(most + 1, dtype=torch.float32)
        if high:
            assert torch.equal(k * high + k * low, k / levels)
        assert high or most > 1000


TILES = {"segment_ptr": "*i32", "first_ptr": "*i64", "starts_ptr": "*i64", "sizes_ptr": "*i64"}
TABLES = {
    **TILES, "head_ptr": "*i64", "body_ptr": "*i64", "end_ptr": "*i64", "first_block_ptr": "*i64",
    "first_element_ptr": "*i64", "block": "i32", "flags_ptr": "*i32", "scales_ptr": "*fp32",
}  # fmt: skip
ENCODE = {**TABLES, "x_ptr": "*fp32", "wire_ptr": "*u8", "levels_ptr": "*i32", "keys_ptr": "*i64"}
DECODE = {
    **TABLES,
    "wire_ptr": "*u8",
    "stride": "i64",
    "messages": "i32",
    "count": "i32",
    "out_ptr": "*fp32",
    "alpha": "fp32",
}
LEVELS = {
    **TABLES,
    "signed_ptr": "*u8",
    "end": "i64",
    "used": "i32",
    "zero": "i32",
    "out_ptr": "*fp32",
    "alpha": "fp32",
}
MASKS = {"MASKED": False, "ALIGNED": True}


def _encode(
    name: str,
    levels: int,
    bits: int,
    block: int,
    scales: int,
    *,
    powers: bool = False,
    unpacked: bool = False,
    masked: bool = False,
) -> Kernel:
    constants = {
        "LEVELS": levels,
        "BITS": bits,
        "COLUMNS": 1 << (bits - 1).bit_length(),
        "POWERS": powers,
        "BLOCK": block,
        "SCALES": scales,
        "UNPACKED": unpacked,
        "MASKED": masked,
        "ALIGNED": not masked,
    }
    warps = 16 if masked else 8
    return Kernel(
        name,
        encode_kernels.quantise_kernel,
        ENCODE,
        constants,
        ("x_ptr", "levels_ptr"),
        num_warps=warps,
        wide=not masked,
    )


def _inverse(levels: int) -> dict[str, float]:
    high, low = plan.inverse(levels, levels)
    return {"HIGH": high, "LOW": low}


KERNELS = [
    _encode("quantise qsgd", 7, 4, 512, 1),
    _encode("quantise qsgd, rest", 7, 4, 512, 1, masked=True),
    _encode("quantise nuqsgd", 7, 4, 512, 2, powers=True),
    _encode("quantise ternary", 1, 2, 0, 0),
    _encode("quantise 1000 levels", 1000, 11, 512, 1),
    _encode("levels of terngrad", 1, 2, 0, 0, unpacked=True),
    Kernel(
        "dequantise qsgd",
        decode_kernels.dequantise_kernel,
        DECODE,
        {"LEVELS": 7, "BITS": 4, "POWERS": False, **_inverse(7), "BLOCK": 512, "BASE3": False, **MASKS},
        ("out_ptr",),
    ),
    Kernel(
        "dequantise ternary",
        decode_kernels.dequantise_kernel,
        DECODE,
        {"LEVELS": 1, "BITS": 2, "POWERS": False, **_inverse(1), "BLOCK": 0, "BASE3": False, **MASKS},
        ("out_ptr",),
    ),
    Kernel(
        "dequantise base 3",
        decode_kernels.dequantise_kernel,
        DECODE,
        {"LEVELS": 1, "BITS": 2, "POWERS": False, **_inverse(1), "BLOCK": 0, "BASE3": True, **MASKS},
        ("out_ptr",),
    ),
    Kernel(
        "dequantise 5 bits",
        decode_kernels.dequantise_kernel,
        DECODE,
        {"LEVELS": 9, "BITS": 5, "POWERS": False, **_inverse(9), "BLOCK": 128, "BASE3": False, **MASKS},
        ("out_ptr",),
    ),
    Kernel(
        "values of sums",
        packed_sums.levels_kernel,
        LEVELS,
        {"LEVELS": 1, "BITS": 5, "POWERS": False, **_inverse(1), "BLOCK": 0, "FRESH": False, **MASKS},
        ("out_ptr",),
    ),
    Kernel(
        "sums",
        packed_sums.packed_sum_kernel,
        {
            "wires_ptr": "*u8",
            "nbytes": "i64",
            "ranks": "i32",
            "sums_ptr": "*u8",
            "sums_nbytes": "i64",
            "flags_ptr": "*i32",
            "n": "i64",
            "most": "i32",
        },
        {"BITS": 2, "SPAN": 1, "SUM_BITS": 5, "COLUMNS": 8},
        wide=False,
    ),
    Kernel(
        "moments",
        norm_kernels.blocks_kernel,
        {**TILES, "x_ptr": "*fp32", "sums_ptr": "*fp64", "largest_ptr": "*i32", "first_out_ptr": "*i64"},
        {"BLOCK": 4096, "WHAT": 3, **MASKS},
        ("x_ptr",),
    ),
    Kernel(
        "squares",
        norm_kernels.blocks_kernel,
        {**TILES, "x_ptr": "*fp32", "sums_ptr": "*fp64", "largest_ptr": "*i32", "first_out_ptr": "*i64"},
        {"BLOCK": 512, "WHAT": 1, **MASKS},
        ("x_ptr",),
    ),
    Kernel(
        "largest of a tensor",
        norm_kernels.tensors_kernel,
        {
            **TILES,
            "parts_ptr": "*fp64",
            "largest_parts_ptr": "*i32",
            "sums_ptr": "*fp64",
            "scales_ptr": "*fp32",
            "first_part_ptr": "*i64",
            "counts_ptr": "*i64",
            "x_ptr": "*fp32",
            "clip": "fp32",
        },
        {"WHAT": 3, "SIZE": 1024},
        wide=False,
    ),
    Kernel(
        "pack",
        packed_sums.pack_kernel,
        {"signed_ptr": "*i32", "wire_ptr": "*u8", "nbytes": "i64", "n": "i64", "zero": "i32"},
        {"BITS": 2, "COLUMNS": 2},
        ("signed_ptr",),
        wide=False,
    ),
]


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_it_compiles(kernel: Kernel, target: str) -> None:
    check(kernel, target)
