"""Error-bounded floats: no element beyond the bound, zeros and signs exact, the bytes of the reference."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, SpecError, WireError

ALL = kernels.runnable()
NATIVE = [name for name in ALL if name != "reference"]
SIZES = (0, 1, 7, 255, 256, 257, 1000, 5000)
LARGEST = torch.finfo(torch.float32).max
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
    wire = kernels.error_bound_encode(x, eb, marks)
    assert wire.numel() <= kernels.error_bound_most(x.numel())
    got = kernels.error_bound_decode(wire, x.numel())
    assert not bool(((got.double() - x.double()).abs() > eb).any())
    assert not bool(got[x == 0].any())
    if marks == "zeros":
        assert torch.equal(got.sign(), x.sign())
        assert torch.equal(kernels.error_bound_support(wire, x.numel()), x != 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("marks", ["bins", "zeros"])
@pytest.mark.parametrize("eb", BOUNDS)
def test_no_element_is_beyond_the_bound(name: str, eb: float, marks: str) -> None:
    with kernels.using(name):
        for n in SIZES:
            for x in inputs(n).values():
                check(x, eb, marks)


@pytest.mark.skipif(not NATIVE, reason="the reference takes minutes")
@pytest.mark.parametrize("marks", ["bins", "zeros"])
def test_half_a_million_blocks_keep_the_bound(marks: str) -> None:
    """32 * 8192 for each kind of marks: all magnitudes, and elements around the ends of bins."""
    n, rng = 256 * 8192, torch.Generator().manual_seed(3)
    for part in range(marks == "bins", 64, 2):
        eb = 2.0 ** random.Random(part).uniform(-12, 4)
        q = torch.randint(-20000, 20000, (n,), generator=rng) >> part % 15
        ends = ((2 * q + 1) * eb).float()
        x = (ends.view(torch.int32) + torch.randint(-2, 3, (n,), generator=rng, dtype=torch.int32)).view(
            torch.float32
        )
        if part % 4 > 1:
            x = torch.randn(n, generator=rng) * torch.exp2(part - 32 + 4 * torch.randn(n, generator=rng))
        check(x[x.isfinite()].contiguous(), eb, marks)


@pytest.mark.parametrize("name", ALL)
def test_what_is_below_the_bound_becomes_zero(name: str) -> None:
    x = torch.tensor([0.05, -0.05, 0.01, 0.0, 1.0, -1.0])
    with kernels.using(name):
        got = kernels.error_bound_decode(kernels.error_bound_encode(x, 0.0501), 6)
        signed = kernels.error_bound_decode(kernels.error_bound_encode(x, 0.0501, "zeros"), 6)
    assert not got[:4].any() and got[4] > 0 > got[5]
    assert torch.equal(signed.sign(), x.sign())


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("marks", ["bins", "zeros"])
def test_the_bytes_are_those_of_the_reference(name: str, marks: str) -> None:
    for n in SIZES:
        for x in inputs(n, seed=1).values():
            for eb in BOUNDS:
                with kernels.using("reference"):
                    wire = kernels.error_bound_encode(x, eb, marks)
                    values = kernels.error_bound_decode(wire, n)
                with kernels.using(name):
                    assert torch.equal(kernels.error_bound_encode(x, eb, marks), wire)
                    got = kernels.error_bound_decode(wire, n)
                    assert torch.equal(got.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("name", ALL)
def test_relu_activations_take_few_bytes(name: str) -> None:
    """Half zeros, bound 0.01 rms: the entropy of white ones is 32 / 6.9 bits an element."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2)).relu()
    with kernels.using(name):
        wire = kernels.error_bound_encode(x, 0.01 * float(x.square().mean().sqrt()))
    assert 4 * x.numel() / wire.numel() > 6.6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 300, 999])
def test_what_is_not_finite_is_refused(name: str, bad: float, at: int) -> None:
    x = torch.ones(1000)
    x[at] = bad
    with kernels.using(name), pytest.raises(NonFiniteError, match="no bound on the error holds"):
        kernels.error_bound_encode(x, 0.1)


@pytest.mark.parametrize("eb", [0.0, -1.0, math.nan, math.inf, 2.0**-101, 2.0**101])
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


@pytest.mark.parametrize("marks", ["bins", "zeros"])
def test_a_damaged_wire_is_refused_or_finite_on_every_implementation(marks: str) -> None:
    rng = random.Random(5)
    wires = [kernels.error_bound_encode(x, 0.03, marks) for x in inputs(700).values()]
    refused = 0
    for _ in range(1500):
        data = bytearray(rng.choice(wires).tolist())
        for _ in range(rng.choice((1, 1, 2, 5))):
            kind, at = rng.randrange(5), rng.randrange(len(data)) if data else 0
            if kind <= 1 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 2 and data:
                data[at] = rng.choice((0, 1, 127, 128, 255))
            elif kind == 3:
                del data[at : at + rng.choice((1, 4, 700))]
            else:
                data[at:at] = rng.randbytes(rng.choice((1, 4)))
        wire = torch.tensor(list(data), dtype=torch.uint8)
        results = []
        for name in ALL:
            with kernels.using(name):
                try:
                    results.append(kernels.error_bound_decode(wire, 700))
                except WireError:
                    results.append(None)
        told = {result is None for result in results}
        assert len(told) == 1, (bytes(data).hex(), [result is None for result in results])
        refused += None in results
        for result in results:
            if result is not None:
                assert result.isfinite().all()
                assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    assert 300 < refused < 1500
