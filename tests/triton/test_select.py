"""Selection in Triton: the entries that the other implementations select, and kernels that fit a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.kernels import checks
from laconic.kernels.select import gpu, triton_kernels
from laconic.kernels.select.sample import dgc_sampling, exact_sampling
from tests.cases import over
from tests.native.test_select import INPUTS
from tests.triton.offline import Kernel, check

TILES = {"starts": "*i64", "sizes": "*i64", "segments": "*i32", "firsts": "*i64"}
SIGNATURES = {
    "levels": "*i32",
    "counts": "*i32",
    "floors": "*i32",
    "offsets": "*i32",
    "indices": "*i32",
    "out": "*i32",
    "x": "*fp32",
    "values": "*fp32",
    "rows": "*i64",
    "needs": "*i64",
    "ks": "*i64",
    "totals": "*i64",
    "ends": "*i64",
    "strides": "*i64",
    "samples": "*i64",
    "ranks": "*i64",
    "lower": "fp32",
    "num_tiles": "i32",
    "num_segments": "i32",
    "room": "i32",
    "keys": "*i64",
    **TILES,
}


def kernel(
    fn: object, wide: bool = False, elements: int = gpu.TILE, num_warps: int = 8, **constants: object
) -> Kernel:
    names = [name for name in fn.arg_names if name not in constants]  # type: ignore[attr-defined]
    signature = {name: SIGNATURES[name] for name in names}
    name = " ".join([fn.__name__, *(f"{key}={value}" for key, value in constants.items())])  # type: ignore[attr-defined]
    pointers = tuple(name for name in names if signature[name].startswith("*"))
    return Kernel(
        name, fn, signature, constants, aligned=pointers, elements=elements, num_warps=num_warps, wide=wide
    )


KERNELS = [
    kernel(
        triton_kernels.levels_kernel, LEVELS=12, BLOCK=gpu.STEP, KEYED=True, elements=gpu.STEP, num_warps=16
    ),
    kernel(triton_kernels.pick_kernel, LEVELS=12, BLOCK=gpu.BLOCK, elements=gpu.BLOCK),
    kernel(triton_kernels.pick_kernel, LEVELS=1, BLOCK=gpu.BLOCK, elements=gpu.BLOCK),
    kernel(triton_kernels.trim_kernel, BLOCK=gpu.STEP // 2, elements=gpu.STEP, num_warps=16),
    *(
        kernel(
            triton_kernels.count_kernel, LEVELS=levels, TILE=gpu.TILE, ALIGNED=whole, WHOLE=whole, wide=whole
        )
        for levels in (1, 4, 12)
        for whole in (True, False)
    ),
    *(
        kernel(triton_kernels.compact_kernel, TILE=gpu.TILE, ALIGNED=whole, WHOLE=whole, wide=whole)
        for whole in (True, False)
    ),
]
SEGMENTS = {
    "empty": Segments.whole(0),
    "one": Segments.whole(1),
    "apart": Segments((3, 1, 5, 4001), (2, 1, 0, 4097)),
    "consecutive": Segments.consecutive([1, 0, 2047, 8192]),
}


@over(make=INPUTS, segments=SEGMENTS, density=(0.0, 0.004, 0.04, 1.0))
def test_selection_equals_the_others(make: Callable[..., Tensor], segments: Segments, density: float) -> None:
    x = make(segments.end + 7, torch.Generator().manual_seed(1))
    ks = torch.tensor([math.ceil(density * size) for size in segments.sizes], dtype=torch.int64)
    plan = exact_sampling(segments.sizes, tuple(ks.tolist()))
    agree(kernels.topk(x, segments, ks), gpu.topk(x, segments, plan))
    if 0 < density < 1:
        keys = [(1 << 63) + 77 * i for i in range(len(segments))]
        plan = dgc_sampling(segments.sizes, tuple(ks.tolist()), density, 0.01, 0.8, 10)
        bits = checks.keys64(keys, len(segments))
        expected = kernels.sampled_topk(x, segments, ks, density, 0.01, keys)
        agree(expected, gpu.sampled_topk(x, segments, plan, bits, 0.8))


@over(make=INPUTS, threshold=(0.0, 1e-40, 0.5, 3.0, float("inf")))
def test_above_equals_the_others(make: Callable[..., Tensor], threshold: float) -> None:
    segments = SEGMENTS["apart"]
    x = make(segments.end, torch.Generator().manual_seed(4))
    levels = torch.full((len(segments),), threshold)
    agree(kernels.above(x, segments, levels), gpu.above(x, segments, levels))


def agree(expected: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[0], expected[0])
    assert got[0].dtype is torch.int32


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
