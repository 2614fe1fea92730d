"""Error-bounded floats: no element beyond the bound, zeros and signs exact, the bytes of the reference."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, SpecError, WireError
from tests import cases
from tests.cases import over

from .targets import ALL, INF, LARGEST, NAN, agree, refused, spoilt

SIZES = (0, 1, 7, 255, 256, 257, 1000, 5000)
BOUNDS = (2.0**-100, 1e-20, 1e-3, 0.03, 1.0, 2.0**100)


def inputs(n: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, chance = torch.randn(n, generator=rng), torch.rand(n, generator=rng)
    return {
        "normal": x,
        "relu": x.relu(),
        "runs": torch.sin(torch.arange(n) / 20).relu(),
        "sparse": torch.where(chance < 0.95, 0.0, x),
        "zeros": torch.zeros(n),
        "negative zeros": -torch.zeros(n),
        "constant": torch.full((n,), 0.37),
        "huge": (x * 1e38).clamp(-LARGEST, LARGEST),
        "denormal": x * 1e-40,
        "far ones": torch.where(chance < 0.01, 1e6 * x, x),
        "powers": torch.exp2(torch.arange(n) % 240 - 120.0) * x.sign(),
    }


def check(x: Tensor, eb: float, marks: str) -> None:
    wire = agree(lambda: kernels.error_bound_encode(x, eb, marks))
    assert wire.numel() <= kernels.error_bound_most(x.numel())
    got = agree(lambda: kernels.error_bound_decode(wire, x.numel()))
    assert not bool(((got.double() - x.double()).abs() > eb).any())
    assert not bool(got[x == 0].any())
    if marks == "zeros":
        assert torch.equal(got.sign(), x.sign())
        assert torch.equal(agree(lambda: kernels.error_bound_support(wire, x.numel())), x != 0)


@over(n=SIZES, kind=[*inputs(0)], eb_marks=[*product(BOUNDS, ("bins", "zeros"))])
def test_no_element_is_beyond_the_bound_and_all_targets_agree(n: int, kind: str, eb_marks: Any) -> None:
    check(inputs(n)[kind], *eb_marks)


@pytest.mark.skipif(len(ALL) == 1, reason="the reference takes minutes")
@over(marks=("bins", "zeros"))
def test_many_blocks_keep_the_bound(marks: str) -> None:
    """All magnitudes, and elements around the ends of bins, on the widest target."""
    n, rng = (256 if cases.full else 32) * 8192, torch.Generator().manual_seed(3)
    for part in range(marks == "bins", 64, 2):
        eb = 2.0 ** random.Random(part).uniform(-12, 4)
        q = torch.randint(-20000, 20000, (n,), generator=rng) >> part % 15
        ends = ((2 * q + 1) * eb).float().view(torch.int32)
        x = (ends + torch.randint(-2, 3, (n,), generator=rng, dtype=torch.int32)).view(torch.float32)
        if part % 4 > 1:
            x = torch.randn(n, generator=rng) * torch.exp2(part - 32 + 4 * torch.randn(n, generator=rng))
        x = x[x.isfinite()].contiguous()
        wire = kernels.error_bound_encode(x, eb, marks)
        got = kernels.error_bound_decode(wire, x.numel())
        assert wire.numel() <= kernels.error_bound_most(x.numel())
        assert not bool(((got.double() - x.double()).abs() > eb).any()) and not bool(got[x == 0].any())
        assert marks == "bins" or torch.equal(got.sign(), x.sign())


def test_elements_below_the_bound_become_zero() -> None:
    x = torch.tensor([0.05, -0.05, 0.01, 0.0, 1.0, -1.0])

    def trip(marks: str) -> Tensor:
        return kernels.error_bound_decode(kernels.error_bound_encode(x, 0.0501, marks), 6)

    got = agree(lambda: trip("bins"))
    assert not got[:4].any() and got[4] > 0 > got[5]
    assert torch.equal(agree(lambda: trip("zeros")).sign(), x.sign())


def test_relu_activations_take_few_bytes() -> None:
    """Half zeros, bound 0.01 rms: the entropy of white ones is 32 / 6.9 bits an element."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2)).relu()
    wire = agree(lambda: kernels.error_bound_encode(x, 0.01 * float(x.square().mean().sqrt())))
    assert 4 * x.numel() / wire.numel() > 6.6


@over(bad=(NAN, INF, -INF), at=(0, 300, 999))
def test_nan_and_inf_are_refused(bad: float, at: int) -> None:
    x = spoilt(1000, at, bad)
    refused("no bound on the error holds", lambda: kernels.error_bound_encode(x, 0.1), error=NonFiniteError)


@over(eb=(0.0, -1.0, NAN, INF, 2.0**-101, 2.0**101))
def test_a_bound_without_bins_is_refused(eb: float) -> None:
    with pytest.raises(SpecError, match="the error bound must be a number in"):
        kernels.error_bound_encode(torch.ones(3), eb)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(SpecError, match="marks must be 'bins' or 'zeros', got 'all'"):
        kernels.error_bound_encode(torch.ones(3), 0.1, "all")
    with pytest.raises(ValueError, match="contiguous"):
        kernels.error_bound_encode(torch.ones(4)[::2], 0.1)
    with pytest.raises(WireError, match="marks='zeros'"):
        kernels.error_bound_support(kernels.error_bound_encode(torch.ones(3), 0.1), 3)
