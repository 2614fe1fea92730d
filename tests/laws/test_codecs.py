"""The laws of codecs: each holds for every codec that is registered."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.spec import parse
from tests.cases import case, over

from .table import SIZES, USUAL, cases, decoded, given, same, specs

SPECS = specs(Codec)
each = over(spec=SPECS)
BAD = (math.nan, math.inf, -math.inf)


@cache
def encoded(spec: str) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Return inputs with their wires and decoded values, made once for all laws that only read them."""
    codec, found = parse(spec), []
    for label, x in (*cases(sizes=SIZES[:-1]), *cases(("normal", "spike"), SIZES[-1:])):
        wire = codec.encode(x, key=3)
        found.append((label, x, wire, codec.decode(wire, x.numel())))
    return found


@each
def test_dtype_shape_and_size(spec: str) -> None:
    codec = parse(spec)
    for label, x, wire, back in encoded(spec):
        assert wire.dtype == torch.uint8 and wire.dim() == 1 and wire.is_contiguous(), label
        most = codec.nbytes(x.numel())
        assert wire.numel() == most if codec.fixed_size else wire.numel() <= most, (label, wire.numel(), most)
        assert back.dtype == torch.float32 and back.shape == x.shape, label
        assert bool(torch.isfinite(back).all()), label


@over(spec=[spec for spec in SPECS if "sparse(" not in spec])
def test_more_elements_never_take_fewer_bytes(spec: str) -> None:
    """A sparse codec relies on it when it reserves room for the most values that a selector may choose."""
    codec = parse(spec)
    sizes = [codec.nbytes(n) for n in range(2000)]
    assert sizes == sorted(sizes)


@over(spec=SPECS, value=BAD)
def test_encoding_nan_or_inf_raises_only_non_finite_error(spec: str, value: float) -> None:
    codec = parse(spec)
    for n in (5, 1001):
        x = given("normal", n)
        x[n // 3] = value
        with suppress(NonFiniteError):
            assert codec.encode(x, key=3).numel() <= codec.nbytes(n)


@over(spec=("centroids()", "sparse(above_share(share=0.1), indices=fine_delta())"), value=BAD)
def test_codecs_that_measure_a_whole_tensor_refuse_nan_and_inf(spec: str, value: float) -> None:
    x = given("normal", 1001)
    x[7] = value
    with pytest.raises(NonFiniteError):
        parse(spec).encode(x, key=3)


@each
def test_equal_keys_give_equal_bytes_and_the_input_stays(spec: str) -> None:
    codec = parse(spec)
    for label, x, wire, _ in encoded(spec):
        before = x.clone()
        assert same(codec.encode(x, key=3), wire), label
        assert same(x, before), label


@each
def test_decode_add_is_add_of_decode(spec: str) -> None:
    codec = parse(spec)
    for label, x, wire, back in encoded(spec):
        if label.startswith(USUAL):
            out = torch.linspace(-1, 1, x.numel())
            plain = out + 0.25 * back
            assert codec.decode_add_(wire, out, alpha=0.25) is out, label
            # one rounding of alpha * value and one of the sum, or a single one where they are fused
            torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-6, msg=label)


@each
def test_zeros_decode_to_zeros(spec: str) -> None:
    codec = parse(spec)
    for n in SIZES:
        assert not codec.decode(codec.encode(torch.zeros(n), key=2), n).any(), n


@each
def test_a_wire_may_start_at_any_byte_of_a_larger_one(spec: str) -> None:
    """A collective delivers all wires in one buffer."""
    codec = parse(spec)
    for label, x, wire, back in encoded(spec):
        for shift in (1, 2, 3) if label.startswith("normal") else ():
            larger = torch.cat([torch.full((shift,), 255, dtype=torch.uint8), wire])
            assert same(codec.decode(larger[shift:], x.numel()), back), label


def check_omega(codec: Codec, x: Tensor, draws: int, least: float = 0.0) -> None:
    """Assert that E|C(x) - x|^2 <= omega |x|^2 + least, with 5 sigma of a coin where keys matter."""
    keyed = not same(*(codec.encode(x, key=key) for key in (0, 1)))
    errors = (decoded(codec, x, draws if keyed else 2).double() - x).square().sum(dim=1)
    omega, norm = codec.omega(x.numel()), float(x.double().square().sum())
    slack = 2.5 * max(1.0, omega) / math.sqrt(len(errors)) if keyed else 0.0
    assert float(errors.mean()) <= (omega + slack) * norm * (1 + 1e-6) + least


@each
def test_the_error_is_within_omega(spec: str) -> None:
    for label, x in cases(USUAL, (1, 7, 100, 1001)):
        with case(input=label):
            check_omega(parse(spec), x, 100)


@over(spec=SPECS, n=(1, 7, 100))
def test_omega_holds_from_end_to_end_of_the_normal_range(spec: str, n: int) -> None:
    """All elements at its lower end, all at its upper end, or anywhere; except for rounding of denormals."""
    codec, rng = parse(spec), torch.Generator().manual_seed(n)
    low, high = codec.normal
    place, signs = torch.rand(n, generator=rng).double(), torch.randn(n, generator=rng).sign().double()
    anywhere = torch.exp2(math.log2(low) + place * (math.log2(high) - math.log2(low)))
    for size in (low * (1 + place), high * (1 + place) / 2, anywhere):
        check_omega(codec, (size.clamp(low, high) * signs).float(), 20, n * 2.0**-298)


@each
def test_the_absolute_error_bound_holds(spec: str) -> None:
    for label, x, _, back in encoded(spec):
        bound = parse(spec).absolute_error(x.numel())
        if bound is not None:
            assert float((back.double() - x).square().sum()) <= bound * (1 + 1e-6), label


@over(spec=[spec for spec in SPECS if parse(spec).unbiased], name=("normal", "heavy"))
def test_unbiased_where_claimed(spec: str, name: str) -> None:
    """The mean of 300 decoded tensors, in 16 random directions: each within 5 sigma of x."""
    x, draws = given(name, 1001), 300
    directions = torch.randn(16, 1001, generator=torch.Generator().manual_seed(0)).sign().double()
    errors = (decoded(parse(spec), x, draws).double() - x) @ directions.T  # (draws, 16)
    sigma = errors.std(dim=0) / math.sqrt(draws)
    assert bool((errors.mean(dim=0).abs() <= 5 * sigma + 1e-6 * x.abs().sum()).all())


@each
def test_clear_zeroes_the_sent_entries(spec: str) -> None:
    for label, x, wire, back in encoded(spec):
        memory = parse(spec).clear_(wire, torch.ones_like(x))
        assert bool(((memory == 0) | (memory == 1)).all()), label
        assert not (back * memory).any(), label


@each
def test_wrong_tensors_keys_and_sizes_are_refused_with_a_fix(spec: str) -> None:
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
        lengths = {*range(0, wire.numel(), 1 + wire.numel() // 60), wire.numel() - 1} - {-1}
        for bad in (*(wire[:m].clone() for m in lengths), torch.cat([wire, wire.new_zeros(1)])):
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
