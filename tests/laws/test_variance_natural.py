"""Natural compression and signs lose what theory says: 100,000 draws, and known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic.core.spec import parse
from tests.cases import over

from .table import decoded

DRAWS = 100_000
# From 0.2 to 0.8 of the way to the next power: at the ends errors are too rare to be measured within 2 %.
X = torch.tensor(
    [1.25, -1.2, 2.5, -2.6666667, 0.7, 5.0, -0.012, 2.4e-5, 1.3e4, -1.7e-6, 100, -1e-10, 1.5, -0.3, 7, 1e5]
)
CODECS = ("natural()", "natural(bits=8)", "sparse(randomk(density=1.0), values=natural())")


def draws(spec: str, x: Tensor) -> Tensor:
    """Return independent draws of the decoded x (n,): float64 (DRAWS, n)."""
    return decoded(parse(spec), x, DRAWS).double()


def halfway(x: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two below |x|, and how far x is on the way to the next one: |x| = below (1 + p)."""
    below = 2.0 ** torch.floor(torch.log2(x.double().abs()))
    return below, x.double().abs() / below - 1


@over(spec=CODECS)
def test_natural_is_right_on_average_and_errs_as_theory_says(spec: str) -> None:
    """100,000 draws of 16 elements: the mean within 5 sigma, the variance p (1 - p) 4^a within 2 % for each;
    and only the two powers around an element occur."""
    below, p = halfway(X)
    assert float(p.min()) > 0.19 and float(p.max()) < 0.81
    found, sigma = draws(spec, X), below * (p * (1 - p) / DRAWS).sqrt()
    assert bool(((found.mean(dim=0) - X.double()).abs() <= 5 * sigma).all())
    measured = (found - X.double()).square().mean(dim=0)
    torch.testing.assert_close(measured, p * (1 - p) * below.square(), rtol=0.02, atol=0)
    assert bool(((found.abs() == below) | (found.abs() == 2 * below)).all())
    assert bool((found.sign() == X.sign()).all())


@over(spec=CODECS[:2])
def test_omega_of_natural_is_an_eighth_and_reached_at_four_thirds(spec: str) -> None:
    omega = parse(spec).omega(1)
    assert omega == 1 / 8
    p = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    share = p * (1 - p) / (1 + p).square()
    assert float(share.max()) == pytest.approx(omega, rel=1e-6) and float(share.max()) <= omega
    assert float(p[share.argmax()]) == pytest.approx(1 / 3, abs=1e-3)
    x = torch.tensor([4 / 3, -4 / 3 * 2.0**-20])
    measured = (draws(spec, x) - x.double()).square().mean(dim=0) / x.double().square()
    torch.testing.assert_close(measured, torch.full_like(measured, omega), rtol=0.02, atol=0)


def test_beyond_their_range_eight_bits_lose_more_than_omega() -> None:
    codec = parse("natural(bits=8)")
    low, high = codec.normal
    for x, sent in ((low, low), (high, high), (2 * high, high), (low / 2, 0.0)):
        assert codec.decode(codec.encode(torch.tensor([x])), 1).item() == sent
        assert ((x - sent) ** 2 > codec.omega(1) * x**2) == (x not in (low, high))


def test_denormals_are_right_on_average() -> None:
    """m 2^-149 becomes 2^-126 with probability m / 2^23, else zero."""
    x = torch.tensor([2.0**-128, -(2.0**-127), 3 * 2.0**-128])
    share = (draws("natural()", x) / 2.0**-126).mean(dim=0)
    sigma = math.sqrt(0.25 / DRAWS)
    assert bool((share - torch.tensor([0.25, -0.5, 0.75])).abs().max() <= 5 * sigma)


@over(spec=("sign(block=8)", "sign(block=100)", "signmean()"))
def test_signs_lose_what_is_not_alike(spec: str) -> None:
    """|C(x) - x|^2 = |x|^2 - |x|_1^2 / b, block by block."""
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) ** 3
    codec = parse(spec)
    lost = float((codec.decode(codec.encode(x), 200).double() - x).square().sum())
    block = getattr(codec, "block", 200)
    parts = torch.split(x.double(), block)
    theory = sum(float(part.square().sum() - part.abs().sum() ** 2 / len(part)) for part in parts)
    assert lost == pytest.approx(theory, rel=1e-6)
    assert theory <= codec.omega(200) * float(x.double().square().sum())


@over(spec=("sign(block=8)", "signmean()"))
def test_one_entry_among_zeros_loses_as_much_as_omega_says(spec: str) -> None:
    codec, x = parse(spec), torch.zeros(8)
    x[3] = -5.0
    lost = float((codec.decode(codec.encode(x), 8).double() - x).square().sum()) / 25
    assert lost == pytest.approx(codec.omega(8)) == pytest.approx(7 / 8)
    alike = torch.full((8,), -5.0)
    assert torch.equal(codec.decode(codec.encode(alike), 8), alike)
