"""The laws of codecs: each holds for every codec that is registered."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.spec import parse

from .table import LIVE, SIZES, USUAL, cases, decoded, given, same, specs

each = pytest.mark.parametrize("spec", specs(Codec))


@pytest.fixture(params=LIVE, autouse=True)
def live(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using(request.param):
        yield request.param


CASES = tuple(cases())
LARGE = max(x.numel() for _, x in CASES)


@cache
def encoded(spec: str, live: str) -> list[tuple[str, Tensor, Tensor]]:
    """Every case with its wire, made once for all laws that only read it; `live` is what made it.

    Of the largest size the reference, which is slow, has one.
    """
    codec = parse(spec)
    few = [x.numel() == LARGE and live == "reference" and "normal" not in label for label, x in CASES]
    chosen = [case for case, left_out in zip(CASES, few, strict=True) if not left_out]
    return [(label, x, codec.encode(x, key=3)) for label, x in chosen]


@each
def test_the_repr_is_the_spec(spec: str) -> None:
    codec = parse(spec)
    assert isinstance(codec, Codec)
    assert parse(repr(codec)) == codec


@each
def test_dtype_shape_and_size(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        assert wire.dtype == torch.uint8 and wire.dim() == 1 and wire.is_contiguous(), label
        most = codec.nbytes(x.numel())
        assert wire.numel() == most if codec.fixed_size else wire.numel() <= most, (label, wire.numel(), most)
        back = codec.decode(wire, x.numel())
        assert back.dtype == torch.float32 and back.shape == x.shape, label


@pytest.mark.parametrize("spec", [spec for spec in specs(Codec) if "sparse(" not in spec])
def test_more_elements_never_take_fewer_bytes(spec: str) -> None:
    """What holds values of a selection relies on it: it sizes for the most that may be selected."""
    codec = parse(spec)
    sizes = [codec.nbytes(n) for n in range(2000)]
    assert sizes == sorted(sizes)


@each
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name_if_at_all(spec: str, value: float) -> None:
    codec = parse(spec)
    for n in (5, 1001):
        x = given("normal", n)
        x[n // 3] = value
        with suppress(NonFiniteError):
            assert codec.encode(x, key=3).numel() <= codec.nbytes(n)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ["centroids()", "sparse(above_share(share=0.1), indices=fine_delta())"])
def test_what_measures_a_whole_tensor_refuses_what_is_not_finite(spec: str, value: float) -> None:
    x = given("normal", 1001)
    x[7] = value
    with pytest.raises(NonFiniteError):
        parse(spec).encode(x, key=3)


@each
def test_equal_keys_give_equal_bytes_and_the_input_stays(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        before = x.clone()
        assert same(codec.encode(x, key=3), wire), label
        assert same(x, before), label


@each
def test_decode_add_is_add_of_decode(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        if not label.startswith(USUAL):
            continue
        out = torch.linspace(-1, 1, x.numel())
        plain = out + 0.25 * codec.decode(wire, x.numel())
        assert codec.decode_add_(wire, out, alpha=0.25) is out, label
        # one rounding of alpha * value and one of the sum, or a single one where they are fused
        torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-6, msg=label)


@each
def test_zeros_decode_to_zeros(spec: str) -> None:
    codec = parse(spec)
    for n in SIZES:
        assert not codec.decode(codec.encode(torch.zeros(n), key=2), n).any(), n


@each
def test_finite_in_finite_out(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        assert bool(torch.isfinite(codec.decode(wire, x.numel())).all()), label


@each
def test_a_wire_may_lie_anywhere_in_a_larger_one(spec: str, live: str) -> None:
    """A collective delivers all wires in one buffer: theirs start at any byte."""
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        if not label.startswith("normal"):
            continue
        back = codec.decode(wire, x.numel())
        for shift in (1, 2, 3):
            larger = torch.cat([torch.full((shift,), 255, dtype=torch.uint8), wire])
            assert same(codec.decode(larger[shift:], x.numel()), back), label


@each
def test_the_error_is_within_omega(spec: str, live: str) -> None:
    """E|C(x) - x|^2 <= omega |x|^2: by the mean over keys where they matter, with 5 sigma of a coin."""
    codec = parse(spec)
    draws = 10 if live == "reference" else 100
    for label, x in cases(USUAL, (1, 7, 100, 1001)):
        omega, norm = codec.omega(x.numel()), float(x.double().square().sum())
        keyed = not same(codec.encode(x, key=0), codec.encode(x, key=1))
        errors = (decoded(codec, x, draws if keyed else 2).double() - x).square().sum(dim=1)
        slack = 2.5 * max(1.0, omega) / math.sqrt(len(errors)) if keyed else 0.0
        assert float(errors.mean()) <= (omega + slack) * norm * (1 + 1e-6), label


@each
def test_omega_holds_from_end_to_end_of_the_normal_range(spec: str) -> None:
    """All elements at its lower end, all at its upper one, or anywhere; but for rounding of denormals."""
    codec = parse(spec)
    low, high = codec.normal
    rng = torch.Generator().manual_seed(0)
    for n in (1, 7, 100):
        place, signs = torch.rand(n, generator=rng).double(), torch.randn(n, generator=rng).sign().double()
        anywhere = torch.exp2(math.log2(low) + place * (math.log2(high) - math.log2(low)))
        for size in (low * (1 + place), high * (1 + place) / 2, anywhere):
            x = (size.clamp(low, high) * signs).float()
            errors = (decoded(codec, x, 20).double() - x).square().sum(dim=1)
            omega, norm = codec.omega(n), float(x.double().square().sum())
            keyed = len(errors.unique()) > 1
            slack = 2.5 * max(1.0, omega) / math.sqrt(len(errors)) if keyed else 0.0
            assert float(errors.mean()) <= (omega + slack) * norm * (1 + 1e-6) + n * 2.0**-298


@each
def test_the_absolute_error_bound_holds(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        bound = codec.absolute_error(x.numel())
        if bound is not None:
            error = codec.decode(wire, x.numel()).double() - x
            assert float(error.square().sum()) <= bound * (1 + 1e-6), label


@pytest.mark.parametrize("spec", [spec for spec in specs(Codec) if parse(spec).unbiased])
def test_unbiased_where_claimed(spec: str, live: str) -> None:
    """The mean of 300 decodes, in 16 random directions: each within 5 sigma of x.

    Of the reference 60 where native code is there, whose 300 are the same bits: tests/native says so.
    """
    codec, draws = parse(spec), 300 if live == LIVE[-1] else 60
    for label, x in cases(("normal", "heavy"), (1001,)):
        directions = torch.randn(16, x.numel(), generator=torch.Generator().manual_seed(0)).sign().double()
        errors = (decoded(codec, x, draws).double() - x) @ directions.T  # (draws, 16)
        sigma = errors.std(dim=0) / math.sqrt(draws)
        assert bool((errors.mean(dim=0).abs() <= 5 * sigma + 1e-6 * x.abs().sum()).all()), label


@each
def test_clear_zeroes_what_the_wire_carries(spec: str, live: str) -> None:
    codec = parse(spec)
    for label, x, wire in encoded(spec, live):
        decoded = codec.decode(wire, x.numel())
        memory = codec.clear_(wire, torch.ones_like(x))
        assert bool(((memory == 0) | (memory == 1)).all()), label
        assert not (decoded * memory).any(), label  # nothing that was sent stays


@each
def test_what_is_no_vector_key_or_size_is_refused_with_a_way_out(spec: str) -> None:
    codec, x = parse(spec), given("normal", 10)
    wire = codec.encode(x)
    for bad, hint in (
        (x.tolist(), "torch.tensor(x, dtype=torch.float32) is one"),
        (x.double(), "x.to(torch.float32) is one"),
        (x.view(2, 5), r"x.flatten() is one"),
        (x.repeat_interleave(2)[::2], "x.contiguous() is one"),
    ):
        with pytest.raises(ValueError, match=f"x must be a contiguous vector.*{re.escape(hint)}"):
            codec.encode(bad)
    for key in (-1, 2**64, "a", 0.5):
        with pytest.raises(ValueError, match=r"key must be a whole number in 0.*got"):
            codec.encode(x, key=key)
    for n in (-1, "10", 10.0):
        with pytest.raises(ValueError, match=r"n must be a whole number of 0 or more.*got"):
            codec.decode(wire, n)
    with pytest.raises(ValueError, match=r"wire must be a contiguous vector of torch\.uint8, got list"):
        codec.decode(wire.tolist(), 10)


@each
def test_cut_and_longer_wires_are_refused(spec: str) -> None:
    codec = parse(spec)
    for x in (given("normal", 100), given("heavy", 7)):
        wire = codec.encode(x, key=3)
        longer = torch.cat([wire, torch.zeros(1, dtype=torch.uint8)])
        for bad in (*(wire[:m].clone() for m in range(wire.numel())), longer):
            with pytest.raises(WireError):
                codec.decode(bad, x.numel())
            with pytest.raises(WireError):
                codec.decode_add_(bad, torch.zeros_like(x))


@each
def test_damaged_wires_are_refused_or_give_a_tensor(spec: str) -> None:
    """And nothing is written before or behind `out`."""
    codec = parse(spec)
    rng = torch.Generator().manual_seed(1)
    for n in (1, 7, 100, 1001):
        wire = codec.encode(given("normal", n), key=3)
        for _ in range(30 if wire.numel() else 0):
            bad = wire.clone()
            for _ in range(int(torch.randint(1, 4, (1,), generator=rng))):
                at = int(torch.randint(0, bad.numel(), (1,), generator=rng))
                bad[at] = int(torch.randint(0, 256, (1,), generator=rng))
            room = torch.full((n + 128,), 7.0)
            try:
                out = codec.decode_add_(bad, room[64 : 64 + n])
            except WireError:
                continue
            assert out.shape == (n,)
            assert bool((room[:64] == 7).all()) and bool((room[64 + n :] == 7).all())
