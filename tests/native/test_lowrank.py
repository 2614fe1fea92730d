"""Thin products: equal to float64 but for rounding, and equal bits whatever else is in the buffer."""

from __future__ import annotations

import itertools

import pytest
import torch

from laconic import kernels
from laconic.core.errors import SpecError
from laconic.kernels.lowrank import batched
from tests.cases import over

from .targets import ALL, agree

SHAPES = ((5, 3), (40, 30), (1, 70), (300, 33), (70, 1), (40, 30), (257, 64), (9, 600), (40, 30))
EPS = 2.0**-24
RANKS = (1, 2, 3, 4, 7)


def laid(shapes=SHAPES, rank=2, gap=3):
    """Matrices with gaps between them, and a flat buffer of random numbers."""
    ends = list(itertools.accumulate((m * n + gap for m, n in shapes), initial=gap))
    rows, cols = (tuple(each) for each in zip(*shapes, strict=True))
    return kernels.Matrices(tuple(ends[:-1]), rows, cols, rank), rand(ends[-1], 1)


def rand(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@over(rank=RANKS)
def test_products_are_those_of_float64_and_all_targets_agree(rank):
    """Each sum errs by EPS a term at most, of the sum of magnitudes."""
    matrices, x = laid(rank=rank)
    left, right = rand(matrices.left, 2), rand(matrices.right, 3)
    p = agree(lambda: kernels.times(x, matrices, right))
    q = agree(lambda: kernels.transposed_times(x, matrices, left))
    out = agree(lambda: kernels.product_add_(x.clone(), matrices, left, right, 1 / 3))
    agree(lambda: kernels.product_add_(x.clone(), matrices, left, right, -0.7))
    agree(lambda: kernels.orthonormal_(p.clone(), rank, matrices.rows))
    for i, matrix in enumerate(matrices.views(x.double())):
        a = matrices.factors(left.double(), matrices.rows)[i].T
        b = matrices.factors(right.double(), matrices.cols)[i].T
        for got, expected, most in (
            (matrices.factors(p, matrices.rows)[i].T, matrix @ b, matrix.abs() @ b.abs()),
            (matrices.factors(q, matrices.cols)[i].T, matrix.T @ a, matrix.T.abs() @ a.abs()),
            (
                matrices.views(out)[i],
                matrix + a @ b.T / 3,
                2 * (matrix.abs() + a.abs() @ b.T.abs()),
            ),
        ):
            assert bool(((got - expected).abs() <= EPS * max(len(matrix), rank + 2, 20) * most).all())
    outside = torch.ones_like(x, dtype=torch.bool)
    for view in matrices.views(outside):
        view.fill_(False)
    assert torch.equal(out[outside], x[outside])


@over(target=ALL, threads=(1, 2))
def test_bits_depend_neither_on_the_rest_of_the_buffer_nor_on_threads(target, threads):
    """A library does not promise it: MKL's products did depend at rank 1, or with 2 threads."""
    matrices, x = laid()
    left, right = rand(matrices.left, 2), rand(matrices.right, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with kernels.using(target):
            p, q = kernels.times(x, matrices, right), kernels.transposed_times(x, matrices, left)
            for i, matrix in enumerate(matrices.views(x)):
                one = kernels.Matrices((0,), matrix.shape[:1], matrix.shape[1:], matrices.rank)
                own = matrix.flatten().clone()
                a = matrices.factors(left, matrices.rows)[i].flatten()
                b = matrices.factors(right, matrices.cols)[i].flatten()
                alone = kernels.times(own, one, b), kernels.transposed_times(own, one, a)
                assert torch.equal(alone[0], matrices.factors(p, matrices.rows)[i].flatten())
                assert torch.equal(alone[1], matrices.factors(q, matrices.cols)[i].flatten())
    finally:
        torch.set_num_threads(before)


@over(size=(7, 64, 1001), scale=(1.0, 1e-30, 1e30))
def test_a_basis_is_orthonormal_and_spans_the_columns(size, scale):
    rank = 5
    columns = rand(rank * size, 4).view(rank, size) * scale
    columns[3] *= 1e-6
    basis = agree(lambda: kernels.orthonormal_(columns.flatten().clone(), rank, (size,)))
    basis = basis.view(rank, size).double()
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.T, eye, rtol=0, atol=1e-6)
    away = columns.double() - columns.double() @ basis.T @ basis
    assert bool((away.norm(dim=1) <= 1e-6 * columns.double().norm(dim=1)).all())


def test_a_column_that_adds_nothing_becomes_zero():
    """Nothing, a multiple, and a sum of earlier ones; no NaN, and the rest is as without them."""
    a, b = rand(50, 5), rand(50, 6)
    given = torch.stack([torch.zeros(50), a, 3 * a, b, a - 2 * b])
    basis = agree(lambda: kernels.orthonormal_(given.flatten().clone(), 5, (50,)).view(5, 50))
    two = agree(lambda: kernels.orthonormal_(torch.cat([a, b]), 2, (50,)).view(2, 50))
    assert torch.equal(basis[[1, 3]], two)
    assert not basis[[0, 2, 4]].any()


def test_batches_of_another_device_agree_with_the_cpu():
    """The same code on the CPU, with matrices that lie evenly and ones that do not. To float32, 300 terms."""
    for shapes in (SHAPES, ((40, 30),) * 4):
        matrices, x = laid(shapes, rank=3)
        left, right = rand(matrices.left, 2), rand(matrices.right, 3)
        p, q, out = torch.empty(matrices.left), torch.empty(matrices.right), x.clone()
        batched.times(x, matrices, right, p)
        batched.transposed_times(x, matrices, left, q)
        batched.product_add_(out, matrices, left, right, -0.7)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(p, kernels.times(x, matrices, right), **close)
        torch.testing.assert_close(q, kernels.transposed_times(x, matrices, left), **close)
        torch.testing.assert_close(out, kernels.product_add_(x.clone(), matrices, left, right, -0.7), **close)
        columns = torch.cat([rand(3 * 40, 7), torch.zeros(40), rand(2 * 40, 8)])
        basis = columns.clone()
        batched.orthonormal_(basis, 3, (40, 40))
        torch.testing.assert_close(basis, kernels.orthonormal_(columns, 3, (40, 40)), rtol=0, atol=1e-6)


def test_batches_stay_within_a_part_of_a_buffer():
    """A bucket can be a view from the middle of a larger storage."""
    matrices = kernels.Matrices((1, 9), (2, 2), (3, 3), rank=1)
    left, right, buffer = rand(matrices.left, 2), rand(matrices.right, 3), rand(40, 4)
    x, alone = buffer[10:30], buffer[10:30].clone()
    for one, other in ((x, alone), (alone, x)):
        p, q = torch.empty(matrices.left), torch.empty(matrices.right)
        batched.times(one, matrices, right, p)
        batched.transposed_times(one, matrices, left, q)
        torch.testing.assert_close(p, kernels.times(other, matrices, right))
        torch.testing.assert_close(q, kernels.transposed_times(other, matrices, left))
    before = buffer.clone()
    batched.product_add_(x, matrices, left, right, -0.7)
    torch.testing.assert_close(x, kernels.product_add_(alone, matrices, left, right, -0.7))
    assert torch.equal(buffer[:10], before[:10]) and torch.equal(buffer[30:], before[30:])


def test_no_matrices_give_empty_products():
    empty, x, none = kernels.Matrices((), (), (), rank=2), torch.ones(3), torch.empty(0)
    assert agree(lambda: kernels.times(x, empty, none)).numel() == 0
    assert agree(lambda: kernels.transposed_times(x, empty, none)).numel() == 0
    assert torch.equal(agree(lambda: kernels.product_add_(x.clone(), empty, none, none)), x)
    assert agree(lambda: kernels.orthonormal_(none.clone(), 2, ())).numel() == 0


def test_what_does_not_fit_is_refused():
    matrices, x = laid(rank=2)
    left, right = torch.zeros(matrices.left), torch.zeros(matrices.right)
    with pytest.raises(ValueError, match="x has 7 elements, but its segments end at"):
        kernels.times(x[:7], matrices, right)
    with pytest.raises(ValueError, match=f"right factors must have {matrices.right} elements, got 1"):
        kernels.times(x, matrices, right[:1])
    with pytest.raises(ValueError, match=f"left factors must have {matrices.left} elements, got 2"):
        kernels.transposed_times(x, matrices, left[:2])
    with pytest.raises(ValueError, match=r"rank 2 and lengths \(4,\) do not fill 7 elements"):
        kernels.orthonormal_(torch.zeros(7), 2, (4,))
    with pytest.raises(SpecError, match=r"rank must be a whole number in 1\.\.1024, got 0"):
        laid(rank=0)


@over(rank=RANKS)
def test_batches_of_bases_agree_with_the_cpu(rank, monkeypatch):
    """Padded to one length, and, where that would take too much memory, to powers of two."""
    lengths = (5, 3000, 40, 1, 257, 40, 3, 3)
    packed = rand(rank * sum(lengths), 9)
    expected = kernels.orthonormal_(packed.clone(), rank, lengths)
    for padded in (1 << 20, 0):
        monkeypatch.setattr(batched, "PADDED", padded)
        batched._padding.cache_clear()
        found = packed.clone()
        batched.orthonormal_(found, rank, lengths)
        count = len(batched._padding(rank, lengths, found.device))
        assert count == 1 if padded else count > 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    batched._padding.cache_clear()


def test_tf32_is_restored_after_the_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with batched.ieee_products(torch.device("cuda")), batched.ieee_products(torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
