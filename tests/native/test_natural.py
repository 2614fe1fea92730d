"""Natural compression: against plain loops over the bits, alike on every target, right on average."""

from __future__ import annotations

import math
import struct
from functools import partial

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from tests.cases import over

from .targets import BUFFERS, DENORMAL, INF, LARGEST, NAN, agree, refused, wire_of

CORNERS = torch.tensor(
    [0.0, -0.0, DENORMAL, -DENORMAL, 2.0**-126 - DENORMAL, LARGEST, -LARGEST, 1.0, -(2.0**127)]
)


def given(segments: Segments) -> Tensor:
    """Numbers of all sizes, from denormals on."""
    rng = torch.Generator().manual_seed(segments.numel)
    n = segments.end + 9
    x = torch.randn(n, generator=rng) * 2.0 ** torch.randint(-140, 120, (n,), generator=rng).double()
    x = x.float()
    x[: len(CORNERS)] = CORNERS[: len(x)]
    return x


def by_hand(x: Tensor, segments: Segments, keys: tuple[int, ...], bits: int) -> bytes:
    """Element by element, from the float's own bits."""
    wire = b""
    for view, key in zip(segments.views(x), keys, strict=True):
        signs, codes = 0, []
        for i, (value, u) in enumerate(
            zip(view.tolist(), kernels.dither24(key, view.numel()).tolist(), strict=True)
        ):
            (pattern,) = struct.unpack("<I", struct.pack("<f", value))
            sign, exponent, mantissa = pattern >> 31, pattern >> 23 & 255, pattern & 0x7FFFFF
            exponent = min(exponent + (u < 2 * mantissa), 254)
            signs |= sign << i
            codes.append(exponent if bits == 9 else sign << 7 | min(max(exponent - 18, 0), 127))
        wire += (signs.to_bytes((view.numel() + 7) // 8, "little") if bits == 9 else b"") + bytes(codes)
    return wire


@over(bits=(8, 9), segments=BUFFERS)
def test_the_exponent_is_rounded_by_the_mantissa(bits: int, segments: Segments) -> None:
    x, keys = given(segments), tuple(range(40, 40 + len(segments)))
    wire = agree(lambda: kernels.natural_encode(x, segments, keys, bits))
    assert bytes(wire.tolist()) == by_hand(x, segments, keys, bits)
    assert wire.numel() == sum(kernels.natural_nbytes(n, bits) for n in segments.sizes)


@over(bits=(8, 9))
def test_all_targets_agree_also_where_16_bits_do_not_decide(bits: int) -> None:
    """Half a million elements: some eight of them have a dither whose upper bits are the mantissa's."""
    n, key = 500_000, 77
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    close = (kernels.dither24(key, n) >> 8) == (x.view(torch.int32) & 0x7FFFFF) >> 7
    assert int(close.sum()) > 1
    agree(lambda: kernels.natural_encode(x, Segments.whole(n), (key,), bits))


@over(bits=(8, 9), segments=BUFFERS)
def test_decoding_adds_powers_of_two(bits: int, segments: Segments) -> None:
    alpha, rng = -1 / 3, torch.Generator().manual_seed(bits)
    start = torch.linspace(-1, 1, segments.end + 9)
    expected, parts = start.clone(), [wire_of()]
    for view, n in zip(segments.views(expected), segments.sizes, strict=True):
        codes = torch.randint(0, 255, (n,), generator=rng)
        signs = torch.randint(0, 2, (n,), generator=rng)
        if bits == 9:
            parts += [kernels.pack_bits(signs.int(), 1), codes.to(torch.uint8)]
        else:
            codes = codes & 127
            parts += [(codes | signs << 7).to(torch.uint8)]
        powers = torch.where(codes > 0, 2.0 ** (codes.double() - (127 if bits == 9 else 109)), 0.0)
        view += (powers * (1 - 2 * signs)).float() * torch.tensor(alpha)
    wire = torch.cat(parts)
    got = agree(lambda: kernels.natural_add_(wire, segments, start.clone(), alpha, bits))
    assert torch.equal(got, expected)
    assert kernels.natural_add_(wire, segments, start, alpha, bits) is start


def test_powers_of_two_are_exact_and_the_ends_are_as_stated() -> None:
    def trip(x: Tensor, key: int, bits: int) -> Tensor:
        def both() -> Tensor:
            whole = Segments.whole(len(x))
            wire = kernels.natural_encode(x, whole, (key,), bits)
            return kernels.natural_add_(wire, whole, torch.zeros(len(x)), bits=bits)

        return agree(both)

    powers = torch.tensor([math.copysign(2.0**a, a % 3 - 1) for a in range(-126, 128)])
    inside = powers[18:145]  # 2^-108 to 2^18
    for key in range(10):
        assert torch.equal(trip(powers, key, 9), powers)
        assert torch.equal(trip(inside, key, 8), inside)
        assert trip(torch.tensor([LARGEST, -LARGEST]), key, 9).tolist() == [2.0**127, -(2.0**127)]
        assert trip(torch.tensor([LARGEST, -300_000.0]), key, 8).tolist() == [2.0**18, -(2.0**18)]
        assert not trip(torch.tensor([2.0**-109, -1e-40, 0.0]), key, 8).any()
    halves = torch.stack([trip(torch.tensor([2.0**-127, -(2.0**-127)]), key, 9) for key in range(200)])
    assert set(halves.abs().flatten().tolist()) == {0.0, 2.0**-126}
    assert 0.4 < float((halves != 0).float().mean()) < 0.6  # 5.6 sigma of 400 coins


@over(bits=(8, 9), bad=(NAN, -NAN, INF, -INF), at=(0, 2, 3, 130, 131, 387, 402))
def test_nan_and_inf_are_refused(bits: int, bad: float, at: int) -> None:
    x, segments = torch.full((403,), LARGEST), Segments.consecutive([3, 400])
    agree(lambda: kernels.natural_encode(x, segments, (1, 2), bits))
    x[at] = bad
    call = partial(kernels.natural_encode, x, segments, (1, 2), bits)
    refused("NaN or Inf", call, error=NonFiniteError)


def test_wires_that_no_encoder_makes_are_refused_before_a_write() -> None:
    segments, x, out = Segments.consecutive([8, 13]), torch.ones(21), torch.zeros(21)
    wire = kernels.natural_encode(x, segments, (1, 2))
    infinite, padded = wire.clone(), wire.clone()
    infinite[-1], padded[9 + 1] = 255, 0b100000
    for match, bad in (
        ("24 bytes, got 23", wire[:-1]),
        ("at most 254", infinite),
        ("must be zero", padded),
    ):
        refused(match, lambda b=bad: kernels.natural_add_(b, segments, out))
    assert not out.any()
    for match, keys, bits in (("bits must be 8 or 9, got 7", (1, 2), 7), ("one key a segment", (1,), 9)):
        refused(match, partial(kernels.natural_encode, x, segments, keys, bits), error=ValueError)
