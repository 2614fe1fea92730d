"""Min-max: every target makes the reference's bytes, and the reference those of single numbers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, SpecError, WireError
from laconic.core.layout import Segments
from laconic.kernels import MinMaxForm

ALL = list(kernels.runnable())
NATIVE = ALL[1:]
BUFFERS = (
    Segments((), ()),
    Segments.whole(1),
    Segments((7, 3, 900, 2000), (0, 1, 700, 257)),
    Segments((2000, 0), (600, 1999)),
)
LARGEST, DENORMAL = torch.finfo(torch.float32).max, 2.0**-149


def data(n: int, seed: int = 0) -> Tensor:
    """Heavy-tailed, with zeros, -0.0, a constant and a stretch of denormals."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3
    x[5:40] = 0
    x[40:60] = -0.0
    x[300:450] = 0.1
    x[600:800] *= 1e-41
    return x


def form_of(*widths: int, block: int = 512, random: bool = False) -> MinMaxForm:
    return MinMaxForm(widths, block, "stochastic" if random else "nearest")


def by_hand(x: Tensor, key: int, width: int, block: int, stochastic: bool) -> bytes:
    """Element by element, each step rounded to float32."""
    one, most = np.float32, (1 << width) - 1
    dither = kernels.dither24(key, x.numel()).tolist()
    head, codes = b"", 0
    for first in range(0, x.numel(), block):
        values = [one(value) for value in x[first : first + block].tolist()]
        low, high = (one(min(max(end, -(2.0**126)), 2.0**126)) + one(0) for end in (min(values), max(values)))
        unit = (high - low) / one(most)
        head += struct.pack("<ff", unit, low)
        for i, value in enumerate(values, first):
            with np.errstate(over="ignore"):
                y = min(max((value - low) / unit, one(0)), one(most)) if unit else one(0)
            up = dither[i] < math.floor((float(y) % 1) * 2**24) if stochastic else 0
            level = math.floor(y) + up if stochastic else math.floor(min(y + one(0.5), one(most)))
            codes |= level << width * i
    return head + codes.to_bytes((x.numel() * width + 7) // 8, "little")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("width", "block"), [(1, 100), (4, 64), (7, 512), (8, 3)])
def test_each_element_as_by_hand(name: str, width: int, block: int, stochastic: bool) -> None:
    x = data(900, width)
    x[850:860] = torch.tensor([LARGEST, -LARGEST]).repeat(5)
    with kernels.using(name):
        wire = kernels.minmax_encode(
            x, Segments.whole(900), [77], form_of(width, block=block, random=stochastic)
        )
    assert bytes(wire.tolist()) == by_hand(x, 77, width, block, stochastic)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 4, 5, 8])
def test_decoding_adds_the_value_of_each_level(name: str, width: int) -> None:
    x, block, n, form = data(900), 200, 900, form_of(width, block=200, random=True)
    wire = kernels.minmax_encode(x, Segments.whole(n), [5], form)
    with kernels.using(name):
        out = kernels.minmax_add_(wire, Segments.whole(n), torch.ones(n), form, -0.3)
    head, body = wire[: 8 * 5].clone().view(torch.float32).view(-1, 2).numpy(), wire[8 * 5 :]
    codes = int.from_bytes(bytes(body.tolist()), "little")
    for i in range(n):
        unit, low = head[i // block]
        level = np.float32(codes >> width * i & (1 << width) - 1)
        assert float(out[i]) == np.float32(1) + (low + level * unit) * np.float32(-0.3)


@pytest.mark.parametrize("segments", BUFFERS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_bytes_are_those_of_the_reference(segments: Segments, stochastic: bool) -> None:
    """Every width, and several in one message."""
    keys = [2**64 - 1 - i for i in range(len(segments))]
    for first in range(8):
        widths = [(first + i) % 8 + 1 for i in range(len(segments))]
        for block, factor in ((1, 1.0), (100, 1e-41), (512, 1e38), (10**6, 1e-20)):
            x = (data(2700, first) * factor).clamp(-LARGEST, LARGEST)
            form = form_of(*widths, block=block, random=stochastic)
            with kernels.using("reference"):
                wire = kernels.minmax_encode(x, segments, keys, form)
                added = kernels.minmax_add_(wire, segments, torch.ones(2700), form, -0.3)
            for name in NATIVE:
                with kernels.using(name):
                    made = kernels.minmax_encode(x, segments, keys, form)
                    again = kernels.minmax_add_(wire, segments, torch.ones(2700), form, -0.3)
                assert torch.equal(made, wire) and torch.equal(again, added)


@pytest.mark.parametrize("name", ALL)
def test_the_last_eight_bits_of_the_dither_count(name: str) -> None:
    """A fraction of 2^-18 is rounded up where the dither is below 64, which 16 bits cannot tell."""
    n = 1 << 18 if name == "reference" else 1 << 22
    x = torch.full((n,), 2.0**-18)
    x[0], x[1] = 1.0, 0.0
    with kernels.using(name):
        wire = kernels.minmax_encode(x, Segments.whole(n), [3], form_of(1, block=n, random=True))
        up = kernels.dither24(3, n)[2:] < 64
    assert torch.equal(kernels.unpack_bits(wire[8:], 1, n)[2:] == 1, up)
    assert name == "reference" or int(up.sum()) >= 4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -DENORMAL, 1e38 / 3, -(2.0**126)])
def test_a_constant_is_sent_as_it_is(name: str, value: float) -> None:
    x = torch.full((700,), value)
    with kernels.using(name):
        for stochastic in (False, True):
            form = form_of(4, random=stochastic)
            wire = kernels.minmax_encode(x, Segments.whole(700), [1], form)
            assert not wire[16:].any()
            assert torch.equal(kernels.minmax_add_(wire, Segments.whole(700), torch.zeros(700), form), x)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 8])
def test_the_largest_numbers_are_cut_off_and_stay_finite(name: str, width: int) -> None:
    x = torch.tensor([LARGEST, -LARGEST, 0.0, 1e38, -1e38])
    with kernels.using(name):
        wire = kernels.minmax_encode(x, Segments.whole(5), [1], form_of(width))
        out = kernels.minmax_add_(wire, Segments.whole(5), torch.zeros(5), form_of(width))
    assert out[0] == out[3] == 2.0**126 and out[1] == out[4] == -(2.0**126)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 15, 511, 512, 9999])
def test_what_is_not_finite_is_refused(name: str, bad: float, at: int) -> None:
    x, segments = torch.ones(10_001), Segments.consecutive([1, 10_000])
    x[1 + at] = bad
    with kernels.using(name), pytest.raises(NonFiniteError, match=r"tensor 1 of the message \(10000"):
        kernels.minmax_encode(x, segments, [1, 2], form_of(4, 4))


@pytest.mark.parametrize("name", ALL)
def test_what_no_encoder_made_is_refused_before_a_write(name: str) -> None:
    segments, form = Segments.consecutive([10, 13]), form_of(4, 3)  # 8 + 5 and 8 + 5 bytes
    with kernels.using(name):
        wire = kernels.minmax_encode(torch.arange(23.0), segments, [0, 0], form)
        cases = [
            ("26 bytes is expected, got 25", wire[:-1]),
            ("26 bytes is expected, got 27", torch.cat([wire, wire[:1]])),
            ("must be zero", torch.cat([wire[:25], wire.new_tensor([0b10000000])])),
        ]
        for at, value in (
            (0, -1.0),
            (0, -0.0),
            (13, math.inf),
            (13, math.nan),
            (17, math.nan),
            (4, -math.inf),
        ):
            number = torch.tensor([value]).view(torch.uint8)
            cases.append(("is negative, or a unit or min", torch.cat([wire[:at], number, wire[at + 4 :]])))
        huge = torch.tensor([LARGEST]).view(torch.uint8)
        cases.append(("a range of tensor 0 has no finite end", torch.cat([huge, wire[4:]])))
        for says, bad in cases:
            out = torch.zeros(23)
            with pytest.raises(WireError, match=says):
                kernels.minmax_add_(bad, segments, out, form)
            assert not out.any()


def test_wrong_options_are_refused() -> None:
    x, whole = torch.zeros(4), Segments.whole(4)
    for widths, block, says in (
        ([9], 512, "width must be a whole number in 1..8, got 9"),
        ([0], 512, "width must be"),
        ([4], 0, "block must be a whole number in 1"),
    ):
        with pytest.raises(SpecError, match=says):
            form_of(*widths, block=block)
    with pytest.raises(ValueError, match=r"one width a segment is needed \(1\), got 2"):
        kernels.minmax_encode(x, whole, [1], form_of(4, 4))
