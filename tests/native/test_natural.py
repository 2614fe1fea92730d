"""Natural compression: against plain loops over the bits, alike on every target, right on average."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments

ALL = list(kernels.runnable())
BUFFERS = (
    Segments.whole(0),
    Segments.whole(1),
    Segments.whole(5_003),
    Segments.consecutive([1, 7, 0, 8, 9, 127, 128, 129, 64]),
    Segments((900, 300, 0), (77, 600, 299)),
)
LARGEST, DENORMAL = torch.finfo(torch.float32).max, 2.0**-149
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
def test_the_exponent_is_rounded_by_the_mantissa(name: str, bits: int, segments: Segments) -> None:
    x, keys = given(segments), tuple(range(40, 40 + len(segments)))
    with kernels.using(name):
        wire = kernels.natural_encode(x, segments, keys, bits)
    assert bytes(wire.tolist()) == by_hand(x, segments, keys, bits)
    assert wire.numel() == sum(kernels.natural_nbytes(n, bits) for n in segments.sizes)


@pytest.mark.parametrize("bits", [8, 9])
def test_all_targets_agree_also_where_16_bits_do_not_decide(bits: int) -> None:
    """Half a million elements: some eight of them have a dither whose upper bits are the mantissa's."""
    n, key = 500_000, 77
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    mantissa = x.view(torch.int32) & 0x7FFFFF
    close = (kernels.dither24(key, n) >> 8) == mantissa >> 7
    assert int(close.sum()) > 1
    wires = []
    for name in ALL:
        with kernels.using(name):
            wires.append(kernels.natural_encode(x, Segments.whole(n), (key,), bits))
    assert all(torch.equal(wire, wires[0]) for wire in wires)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
def test_decoding_adds_powers_of_two(name: str, bits: int, segments: Segments) -> None:
    alpha = -1 / 3
    rng = torch.Generator().manual_seed(bits)
    expected = torch.linspace(-1, 1, segments.end + 9)
    out, parts = expected.clone(), []
    for view, n in zip(segments.views(expected), segments.sizes, strict=True):
        codes = torch.randint(0, 255, (n,), generator=rng)
        signs = torch.randint(0, 2, (n,), generator=rng)
        if bits == 9:
            parts += [kernels.pack_bits(signs.to(torch.int32), 1), codes.to(torch.uint8)]
            powers = torch.where(codes > 0, 2.0 ** (codes.double() - 127), 0.0)
        else:
            codes = codes & 127
            parts += [(codes | signs << 7).to(torch.uint8)]
            powers = torch.where(codes > 0, 2.0 ** (codes.double() - 109), 0.0)
        view += (powers * (1 - 2 * signs)).float() * torch.tensor(alpha)
    wire = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    with kernels.using(name):
        assert kernels.natural_add_(wire, segments, out, alpha, bits) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ALL)
def test_powers_of_two_are_exact_and_the_ends_are_as_stated(name: str) -> None:
    def trip(x: Tensor, key: int, bits: int) -> Tensor:
        whole = Segments.whole(len(x))
        wire = kernels.natural_encode(x, whole, (key,), bits)
        return kernels.natural_add_(wire, whole, torch.zeros(len(x)), bits=bits)

    with kernels.using(name):
        for key in range(20):
            powers = torch.tensor([math.copysign(2.0**a, a % 3 - 1) for a in range(-126, 128)])
            assert torch.equal(trip(powers, key, 9), powers)
            inside = powers[18:145]  # 2^-108 to 2^18
            assert torch.equal(trip(inside, key, 8), inside)
            assert trip(torch.tensor([LARGEST, -LARGEST]), key, 9).tolist() == [2.0**127, -(2.0**127)]
            assert trip(torch.tensor([LARGEST, -300_000.0]), key, 8).tolist() == [2.0**18, -(2.0**18)]
            assert not trip(torch.tensor([2.0**-109, -1e-40, 0.0]), key, 8).any()
        halves = torch.stack([trip(torch.tensor([2.0**-127, -(2.0**-127)]), key, 9) for key in range(200)])
        assert set(halves.abs().flatten().tolist()) == {0.0, 2.0**-126}
        assert 0.4 < float((halves != 0).float().mean()) < 0.6  # 5.6 sigma of 400 coins


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, bits: int, bad: float) -> None:
    segments = Segments.consecutive([3, 400])
    with kernels.using(name):
        for at in (0, 2, 3, 130, 131, 387, 402):
            x = torch.full((403,), LARGEST)
            kernels.natural_encode(x, segments, (1, 2), bits)
            x[at] = bad
            with pytest.raises(NonFiniteError, match="NaN or Inf"):
                kernels.natural_encode(x, segments, (1, 2), bits)


@pytest.mark.parametrize("name", ALL)
def test_what_no_encoder_made_is_refused_before_a_write(name: str) -> None:
    segments = Segments.consecutive([8, 13])
    with kernels.using(name):
        wire = kernels.natural_encode(torch.ones(21), segments, (1, 2))
        infinite, padded = wire.clone(), wire.clone()
        infinite[-1], padded[9 + 1] = 255, 0b100000
        for bad, says in (
            (wire[:-1], "24 bytes, got 23"),
            (infinite, "at most 254"),
            (padded, "must be zero"),
        ):
            out = torch.zeros(21)
            with pytest.raises(WireError, match=says):
                kernels.natural_add_(bad, segments, out)
            assert not out.any()
    with pytest.raises(ValueError, match="bits must be 8 or 9, got 7"):
        kernels.natural_encode(torch.ones(21), segments, (1, 2), 7)
    with pytest.raises(ValueError, match="one key a segment"):
        kernels.natural_encode(torch.ones(21), segments, (1,))
