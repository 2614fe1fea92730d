"""Random rounding against its theory: 100,000 draws of each, its mean, its variance, and its worst case.

A message of 100,000 equal tensors, each with a key of its own, is 100,000 independent draws. With e the error
of one entry and v its exact variance, the mean of e is within 5 sqrt(v / 100,000) of 0, and the mean of |e|^2
over 16 entries within 2 % of the sum of v (about 3 standard deviations where an error is rare).
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.quantiser import variance
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import parse
from tests.cases import over

from .table import decoded, listed

DRAWS = 100_000


def drawn(spec: str, x: Tensor, draws: int = DRAWS) -> Tensor:
    """Return independent draws of the decoded x (n,): float64 (draws, n)."""
    return decoded(parse(spec), x, draws).double()


def grid_of(spec: str) -> list[float]:
    """The levels of a codec, as shares of its scale."""
    codec = parse(spec)
    s = codec.form.levels
    if codec.form.grid == "uniform":
        return [level / s for level in range(s + 1)]
    return [0.0, *(2.0 ** (level - s) for level in range(1, s + 1))]


def variances(spec: str, x: Tensor, scale: float) -> Tensor:
    """(u - low) (high - u) scale^2 of each entry, u = |x| / scale, in double: what the theory says."""
    grid = torch.tensor(grid_of(spec), dtype=torch.float64)
    u = (x.double().abs() / scale).clamp(max=1)
    above = torch.searchsorted(grid, u).clamp(1, len(grid) - 1)
    return ((u - grid[above - 1]) * (grid[above] - u)).clamp(min=0) * scale**2


SAMPLE = torch.tensor(
    [1.0, -0.9, 0.8, -0.66, 0.55, 0.4, -0.35, 0.3, -0.22, 0.2, 0.13, -0.1, 0.07, 0.05, 0.02, 0.0]
)

UNBIASED = """
qsgd(); qsgd(levels=1); qsgd(levels=3, block=0, norm='l2'); qsgd(levels=1, coding='rice')
qsgd(levels=5, coding='elias'); nuqsgd(levels=4); natural_dithering(levels=3); ternary(clip=0)
natural_dithering(levels=7, norm='l2'); ternary(clip=0, packing='base3')
"""


@over(spec=listed(UNBIASED))
def test_unbiased_and_as_variable_as_the_theory_says(spec: str) -> None:
    assert parse(spec).unbiased
    l2 = getattr(parse(spec), "norm", "l2" if spec.startswith("nuqsgd") else "max") == "l2"
    scale = float(SAMPLE.double().norm() if l2 else SAMPLE.abs().max())
    error, exact = drawn(spec, SAMPLE) - SAMPLE.double(), variances(spec, SAMPLE, scale)
    assert bool((error.mean(dim=0).abs() <= 5 * (exact / DRAWS).sqrt() + 1e-6).all())
    assert float(error.square().sum(dim=1).mean()) == pytest.approx(float(exact.sum()), rel=0.02)


def test_clipping_costs_what_it_cuts_off() -> None:
    """TernGrad with clip = 1.5: beyond s every draw errs by |x| - s, below it as without clipping."""
    scale = 1.5 * float(SAMPLE.double().std(correction=0))
    beyond = SAMPLE.abs() > scale
    assert 0 < int(beyond.sum()) < 8
    drawn_values = drawn("ternary(clip=1.5)", SAMPLE)
    torch.testing.assert_close(
        drawn_values[:, beyond], (SAMPLE.sign() * scale)[beyond].double().expand(DRAWS, -1)
    )
    exact = torch.where(
        beyond, (SAMPLE.double().abs() - scale).square(), variances("ternary()", SAMPLE, scale)
    )
    error = drawn_values - SAMPLE.double()
    assert bool((error.mean(dim=0).abs() <= 5 * (exact / DRAWS).sqrt() + 1e-6)[~beyond].all())
    assert float(error.square().sum(dim=1).mean()) == pytest.approx(float(exact.sum()), rel=0.02)


def test_the_cutoff_sends_nothing_small_and_the_rest_unbiased() -> None:
    kept = SAMPLE.abs() >= 0.5 * SAMPLE.abs().mean()
    values = drawn("cutoff(share=0.5, levels=2)", SAMPLE)
    assert 8 < int(kept.sum()) < 16 and not values[:, ~kept].any()
    exact = variances("cutoff(levels=2)", SAMPLE, 1.0)
    error = (values - SAMPLE.double())[:, kept]
    assert bool((error.mean(dim=0).abs() <= 5 * (exact[kept] / DRAWS).sqrt() + 1e-6).all())


def repeated(value: float, n: int, *others: float) -> Tensor:
    """n entries of this size with changing signs, after some others."""
    signs = torch.ones(n)
    signs[1::2] = -1
    return torch.cat([torch.tensor(others), value * signs])


WORST = {  # codec to the input that its bound is made for
    "qsgd(block=0)": repeated(1 / 7 / (1 + math.sqrt(1 + 2000 / 49)), 2000, 1.0),
    "qsgd(levels=1, block=0)": repeated(1 / (1 + math.sqrt(1 + 99)), 99, 1.0),
    "qsgd(levels=2, norm='l2')": repeated(1.0, 400),
    "qsgd(levels=6, norm='l2')": repeated(1.0, 16),
    "nuqsgd(levels=3)": repeated(1.0, 256),
    "natural_dithering(levels=3)": repeated(0.25 / (1 + math.sqrt(17)), 256, 1.0),
    "natural_dithering()": repeated(2 / 3, 100, 1.0),
    "ternary(clip=0)": repeated(1 / (1 + math.sqrt(1 + 99)), 99, 1.0),
    "ternary()": repeated(0.625, 9999, 100 * math.sqrt(1 - 0.625**2)),
}


@over(spec=[*WORST])
def test_the_worst_input_reaches_the_bound(spec: str) -> None:
    """Within 5 %: the bound is no larger than it must be, and it holds."""
    x, codec = WORST[spec], parse(spec)
    draws = 4_000_000 // x.numel()
    error = (drawn(spec, x, draws) - x.double()).square().sum(dim=1).mean()
    assert float(error / x.double().square().sum()) == pytest.approx(codec.omega(x.numel()), rel=0.05)


@over(name=("qsgd", "natural_dithering"), norm=("max", "l2"))
def test_no_input_exceeds_the_bound(name: str, norm: str) -> None:
    """The exact variance of 1,000 inputs of many shapes; some come near."""
    rng = torch.Generator().manual_seed(1)
    nearest = 0.0
    for trial in range(1000):
        n, spec = 2 + trial % 40, f"{name}(levels={1 + trial % 7}, block=0, norm={norm!r})"
        x = torch.rand(n, generator=rng).pow(trial % 9) * (0.01 + 0.99 * torch.rand(n, generator=rng).round())
        scale = float(kernels.norms(x, Segments.whole(n), kernels.Measure(norm)))
        if scale:
            share = float(variances(spec, x, scale).sum() / x.double().square().sum())
            bound = parse(spec).omega(n)
            assert share <= bound, (spec, x)
            nearest = max(nearest, share / bound)
    assert nearest > 0.9


def test_bounds_are_no_weaker_than_the_papers() -> None:
    for n in (2, 10, 1000, 10**6):
        for s in (1, 3, 7, 100):
            assert variance.uniform(n, s, "l2") <= min(n / s**2, math.sqrt(n) / s)
            if s < 100:
                r = math.sqrt(n) * 2.0 ** (1 - s)
                assert variance.powers(n, s, "l2") <= 1.000001 * (1 / 8 + r * min(1, r))


def test_natural_dithering_is_fine_dithering_and_natural_compression() -> None:
    """In distribution: how often each entry becomes each level, within 5 sigma of both."""
    fine = drawn("qsgd(levels=8)", SAMPLE).to(torch.float32)
    natural: Codec = parse("natural()")
    twice = natural.decode(natural.encode(fine.flatten(), key=9), fine.numel()).view_as(fine)
    once = drawn("natural_dithering(levels=4)", SAMPLE).to(torch.float32)
    for level in (0.0, 0.125, 0.25, 0.5, 1.0):
        p, q = ((values.abs() == level).double().mean(dim=0) for values in (twice, once))
        sigma = ((p * (1 - p) + q * (1 - q)) / DRAWS).sqrt()
        assert bool(((p - q).abs() <= 5 * sigma + 1e-5).all()), level
    assert set(twice.abs().unique().tolist()) == {0.0, 0.125, 0.25, 0.5, 1.0}


def test_the_sum_of_levels_is_right_and_that_of_inverted_rounding_is_not() -> None:
    """Rounding up with probability 1 - f, as a public code does, would be seen: it is 50 sigma away."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(0)) ** 3
    s, z = 15, x.abs().max()
    a = (s * x.abs() / z).double()
    f = a - a.floor()
    sigma = math.sqrt(float((f * (1 - f)).sum()) / 100)
    segments = Segments.consecutive([512] * 100)
    _, levels = kernels.quantise_levels(x.repeat(100), segments, range(100), kernels.Form(s))
    total = float(levels.abs().sum()) / 100
    assert abs(total - float(a.sum())) <= 5 * sigma
    assert abs(float((a.floor() + 1 - f).sum()) - total) > 50 * sigma


def test_rounding_is_exact_on_the_grid() -> None:
    """What is a level already has no variance: every draw gives it back."""
    x = torch.tensor([float(Fraction(level, 8)) for level in range(-8, 9)])
    for spec in ("qsgd(levels=8)", "qsgd(levels=16)"):
        assert torch.equal(drawn(spec, x, 200), x.double().expand(200, -1))
    powers = torch.tensor([0.0, 1.0, -0.5, 0.25, -0.125])
    assert torch.equal(drawn("natural_dithering(levels=4)", powers, 200), powers.double().expand(200, -1))
