"""Low-rank products in Triton: near those of float64, in any rank, and kernels that fit a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from laconic.kernels import Matrices
from laconic.kernels.lowrank import gpu, grids, reference
from tests.triton.offline import Kernel, check

SHAPES = [
    Matrices((3,), (5,), (7,), 1),
    Matrices((0, 700), (33, 16), (20, 256), 2),
    Matrices((1, 2000, 90, 30000), (40, 300, 257, 3), (17, 9, 4, 1025), 3),
    Matrices((0, 200000), (600, 1), (301, 140), 4),
]


def problem(matrices: Matrices):
    rng = torch.Generator().manual_seed(matrices.left)
    x = torch.randn(matrices.segments.end + 3, generator=rng)
    return x, torch.randn(matrices.left, generator=rng), torch.randn(matrices.right, generator=rng)


@pytest.mark.parametrize("matrices", SHAPES, ids=lambda m: f"{len(m)}x{m.rank}")
def test_products_are_near_those_of_float64(matrices: Matrices) -> None:
    x, left, right = problem(matrices)
    made_left, made_right = torch.full_like(left, torch.nan), torch.full_like(right, torch.nan)
    gpu.times(x, matrices, right, made_left)
    gpu.transposed_times(x, matrices, left, made_right)
    added = x.clone()
    gpu.product_add_(added, matrices, left, right, -0.5)
    wanted = x.double()
    ps, qs = matrices.factors(left.double(), matrices.rows), matrices.factors(right.double(), matrices.cols)
    made_ps, made_qs = matrices.factors(made_left, matrices.rows), matrices.factors(made_right, matrices.cols)
    for matrix, wants, p, q, made_p, made_q in zip(
        matrices.views(x.double()), matrices.views(wanted), ps, qs, made_ps, made_qs, strict=True
    ):
        torch.testing.assert_close(made_p.double(), q @ matrix.T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(made_q.double(), p @ matrix, rtol=1e-5, atol=1e-4)
        wants -= 0.5 * p.T @ q
    torch.testing.assert_close(added.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_columns_become_orthonormal_as_in_the_reference(rank: int) -> None:
    lengths = (1, 2, 40, 1025, 2500)
    packed = torch.randn(rank * sum(lengths), generator=torch.Generator().manual_seed(rank))
    parts = torch.split(packed, [rank * length for length in lengths])
    parts[2].view(rank, -1)[-1] = parts[2].view(rank, -1)[0] * 3  # depends on an earlier one
    parts[3].mul_(1e-30)
    expected, made = packed.clone(), packed.clone()
    reference.orthonormal_(expected, rank, lengths)
    gpu.orthonormal_(made, rank, lengths)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    packed = torch.ones(2 * (5 + 3))
    packed[3] = bad
    gpu.orthonormal_(packed, 2, (5, 3))
    assert packed[:10].isnan().any()
    assert packed[10:].isfinite().all()


def test_matrices_without_elements_are_no_work() -> None:
    none = Matrices((0, 0), (0, 4), (3, 0), 2)
    right = torch.ones(none.right)
    gpu.times(torch.ones(0), none, right, left := torch.ones(none.left))
    gpu.transposed_times(torch.ones(0), none, left, right)
    assert left.tolist() == [0.0] * 8
    assert right.tolist() == [0.0] * 6


TABLES = (
    "starts",
    "rows",
    "cols",
    "lefts",
    "rights",
    "matrices",
    "firsts",
    "tops",
    "places",
    "counts",
    "sizes",
)
TABLES += ("lengths",)
TYPES = {name: "*i64" for name in TABLES} | {"work": "*fp64", "alpha": "fp32"}
CONSTANTS = {
    gpu.times_kernel: {"ROWS": grids.ROWS, "COLS": grids.COLS},
    gpu.transposed_times_kernel: {"HEIGHT": grids.HEIGHT, "TALL": grids.TALL, "WIDE": grids.WIDE},
    gpu.total_kernel: {"PART": grids.PART},
    gpu.product_add_kernel: {"ROWS": grids.ROWS, "COLS": grids.COLS},
    gpu.orthonormal_kernel: {"SPENT": reference.SPENT, "LENGTH": grids.LENGTH},
}


def specialised() -> list[Kernel]:
    made = []
    for fn, constants in CONSTANTS.items():
        for rank in (2, 4):
            given = dict(constants)
            if "RANK" in fn.arg_names:
                given["RANK"] = rank
            if "FULL" in fn.arg_names:
                given["FULL"] = gpu.full_of(rank)
            types = {name: TYPES.get(name, "*fp32") for name in fn.arg_names if name not in given}
            pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
            made.append(Kernel(f"{fn.__name__} {rank}", fn, types, given, aligned=pointers, wide=False))
    return made


KERNELS = specialised()


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
