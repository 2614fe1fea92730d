"""A rotation before few bits: a Hadamard matrix after random signs."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each, refuses

from laconic.codecs.rotated import by_blocks, signs
from laconic.core.errors import SpecError
from laconic.core.spec import parse


def error(spec: str, x: torch.Tensor) -> float:
    """|C(x) - x|^2 / |x|^2."""
    codec = parse(spec)
    return float((codec.decode(codec.encode(x), x.numel()) - x).square().sum() / x.square().sum())


def test_a_rotation_is_the_hadamard_matrix_after_signs() -> None:
    """H[i, j] = (-1)^(bits that i and j share), by brute force; float32 rounds to 2^-24."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    wanted = (h.double() @ (signs(16) * x.double()) / 4).float()
    torch.testing.assert_close(by_blocks(x, 16), wanted, rtol=1e-6, atol=1e-6)


@for_each("n", [0, 1, 3, 4, 1023, 1024, 3 * 1024 + 64 + 7])
def test_back_undoes_a_rotation(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    turned = by_blocks(x, 1024)
    assert n < 4 or not torch.equal(turned, x)
    torch.testing.assert_close(turned.norm(), x.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(by_blocks(turned, 1024, back=True), x, rtol=1e-5, atol=1e-6)


def test_outliers_cost_less_after_a_rotation() -> None:
    """Normal elements, of which one in 256 is 20 times larger, lose less than a third."""
    x = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    x[::256] *= 20
    assert error("rotated(minmax(bits=4))", x) < error("minmax(bits=4)", x) / 3
    # A constant block is no spike of 32, as it would be without signs; a normal one has 4.5 in 100,000.
    assert by_blocks(torch.ones(1024), 1024).abs().max() < 6
    refuses(SpecError, "block", parse, "rotated(minmax(), block=512)")
    # Of a contraction a large tensor is one too: rounding alone does not make error feedback refuse it.
    assert parse("rotated(signmean())").omega(3_000_000) < 1
