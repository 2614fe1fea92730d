"""Accumulation in Triton: the bits of the reference, and kernels that fit a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.accumulate import gpu, reference
from tests.triton.offline import Kernel, check

TILES = {"starts": "*i64", "sizes": "*i64", "segments": "*i32", "firsts": "*i64"}
OPERANDS = {
    gpu.all_finite_kernel: {"x": "*fp32", "flag": "*i32"},
    gpu.accumulate_kernel: {
        "residual": "*fp32",
        "grad": "*fp32",
        "flag": "*i32",
        "scale": "fp32",
        "decay": "fp32",
    },
    gpu.velocity_kernel: {
        "velocity": "*fp32",
        "residual": "*fp32",
        "grad": "*fp32",
        "fresh": "*fp32",
        "flag": "*i32",
        "momentum": "*fp32",
        "leads": "*fp32",
        "shares": "*fp32",
        "scale": "fp32",
    },
}
OPTIONS = {
    gpu.all_finite_kernel: ({},),
    gpu.accumulate_kernel: ({"KEEP": False}, {"KEEP": True}),
    gpu.velocity_kernel: tuple(
        {"NESTEROV": nesterov, "AHEAD": ahead} for nesterov in (False, True) for ahead in (False, True)
    ),
}


def specialised(whole: bool) -> list[Kernel]:
    made = []
    for fn, operands in OPERANDS.items():
        for options in OPTIONS[fn]:
            constants = {"TILE": gpu.TILE, "ALIGNED": whole, "WHOLE": whole, **options}
            pointers = [name for name, kind in {**operands, **TILES}.items() if kind.startswith("*")]
            chosen = [option.lower() for option, value in options.items() if value]
            made.append(
                Kernel(
                    " ".join([fn.__name__, "whole" if whole else "last", *chosen]),
                    fn,
                    {**operands, **TILES},
                    constants,
                    aligned=tuple(pointers),
                    most=32 if whole else None,
                    wide=whole,
                    num_warps=gpu.WARPS[whole],
                )
            )
    return made


KERNELS = [*specialised(True), *specialised(False)]
SEGMENTS = [
    Segments.whole(0),
    Segments.whole(1),
    Segments.whole(8192),
    Segments((1, 9000, 50), (40, 4097, 513)),
    Segments.consecutive([4096, 7, 0, 4095]),
]


def inputs(segments: Segments, spoiled: bool) -> list[Tensor]:
    rng = torch.Generator().manual_seed(segments.numel)
    u, v, g = (torch.randn(segments.end + 5, generator=rng) * 10 for _ in range(3))
    g[::7] = -0.0
    g[1::11] *= 1e-42
    if spoiled and segments.numel:
        first, last = segments.starts[0], segments.starts[0] + segments.sizes[0] - 1
        v[first] = g[first] = 3e38
        g[last] = float("nan")
    return [u, v, g]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda s: f"{s.numel}in{len(s)}")
@pytest.mark.parametrize("spoiled", [False, True])
def test_accumulation_equals_the_reference(segments: Segments, spoiled: bool) -> None:
    u, v, g = inputs(segments, spoiled)
    assert gpu.all_finite(g, segments) == reference.all_finite(g, segments)
    for scale, decay in ((1.0, 1.0), (1 / 3, 0.9)):
        for keep in (False, True):
            got, expected, got_g, expected_g = v.clone(), v.clone(), g.clone(), g.clone()
            clean = gpu.accumulate_(got, got_g, segments, scale, decay, keep)
            assert clean == reference.accumulate_(expected, expected_g, segments, scale, decay, keep)
            assert same(got, expected)
            assert torch.equal(got_g.nan_to_num(), expected_g.nan_to_num())
    v[::5] = 0
    for nesterov, ahead in ((False, 0.0), (True, 0.0), (False, 0.3), (True, 1.0)):
        for momentum in (torch.full((len(segments),), 0.9), torch.linspace(0.3, 0.99, len(segments))):
            got, expected = ([x.clone() for x in (u, v, g, v)] for _ in range(2))
            clean = gpu.velocity_(*got, segments, momentum, 1 / 3, nesterov, ahead)
            assert clean == reference.velocity_(*expected, segments, momentum, 1 / 3, nesterov, ahead)
            assert all(map(same, got, expected))


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
