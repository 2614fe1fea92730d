"""Stochastic rounding: between neighbours, unbiased, equal for equal keys; brute force first."""

from __future__ import annotations

import math

import torch
from tests.unit.shared import for_each

from laconic.optim.stochastic_rounding import HALF, round_at_random

DRAWS = 100_000


def grid(dtype):
    """All finite values of a 16-bit format, ascending, float64."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).double()
    return every[every.isfinite()].unique()


def values(dtype):
    """float32 values of every size, between the grid's points and on them."""
    rng = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 15, (4000,), generator=rng)
    x = torch.randn(4000, generator=rng) * 2.0**exponents
    return torch.cat([x, torch.zeros(2), grid(dtype)[::97].float()])


@for_each("dtype", HALF)
def test_results_are_the_neighbours_on_the_grid(dtype):
    points, x = grid(dtype), values(dtype)
    above = torch.searchsorted(points, x.double()).clamp(0, len(points) - 1)
    on = points[above] == x.double()
    below = torch.where(on, above, (above - 1).clamp(min=0))
    for key in range(5):
        found = round_at_random(x, dtype, key)
        assert found.dtype == dtype
        assert bool(((found.double() == points[above]) | (found.double() == points[below])).all())


@for_each("dtype", HALF)
@for_each("x", [1 + 2**-9 + 2**-12, -1 - 2**-13, 3.14159, 1e-4, -0.3333, 3e-8, -5.5e-6])
def test_it_is_unbiased(dtype, x):
    """The mean of 100,000 draws is within five standard errors of x, and both neighbours come up."""
    x = torch.full((DRAWS,), x)
    found = round_at_random(x, dtype, key=7).double()
    low, high = float(found.min()), float(found.max())
    assert low < float(x[0]) < high
    share = (float(x[0]) - low) / (high - low)
    error = (high - low) * math.sqrt(share * (1 - share) / DRAWS)
    assert abs(float(found.mean()) - float(x[0])) < 5 * error


@for_each("dtype", HALF)
def test_the_grid_and_what_is_not_finite_stay_and_the_largest_is_the_limit(dtype):
    points = grid(dtype).float()
    assert torch.equal(round_at_random(points, dtype, 3).float(), points)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    torch.testing.assert_close(round_at_random(special, dtype, 3).float(), special, equal_nan=True)
    most = torch.tensor([3.4e38, -3.4e38])
    assert round_at_random(most, dtype, 3).float().abs().tolist() == [float(points.max())] * 2


@for_each("dtype", HALF)
def test_a_key_gives_its_bits(dtype):
    one, again, other = (round_at_random(values(dtype), dtype, key) for key in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert round_at_random(torch.empty(0, 3), dtype, 1).shape == (0, 3)
    assert round_at_random(torch.tensor(1.003), dtype, 1).shape == ()
