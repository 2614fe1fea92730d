"""Min-max: every target makes the reference's bytes, and the reference those of single numbers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, SpecError
from laconic.core.layout import Segments
from laconic.kernels import MinMaxForm
from tests.cases import over

from .targets import (
    BUFFERS,
    DENORMAL,
    INF,
    LARGEST,
    NAN,
    agree,
    bytes_of,
    heavy,
    keys_of,
    on_every_target,
    refused,
    spoilt,
)


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


@over(width_block=((1, 100), (4, 64), (7, 512), (8, 3)), stochastic=(False, True))
def test_each_element_as_by_hand(width_block: tuple[int, int], stochastic: bool) -> None:
    (width, block), whole = width_block, Segments.whole(900)
    x, form = heavy(900, width), form_of(width, block=block, random=stochastic)
    x[850:860] = torch.tensor([LARGEST, -LARGEST]).repeat(5)
    wire = agree(lambda: kernels.minmax_encode(x, whole, [77], form))
    assert bytes(wire.tolist()) == by_hand(x, 77, width, block, stochastic)


@over(width=(1, 4, 5, 8))
def test_decoding_adds_the_value_of_each_level(width: int) -> None:
    x, block, n, form = heavy(900), 200, 900, form_of(width, block=200, random=True)
    wire = kernels.minmax_encode(x, Segments.whole(n), [5], form)
    out = agree(lambda: kernels.minmax_add_(wire, Segments.whole(n), torch.ones(n), form, -0.3))
    head, body = wire[: 8 * 5].clone().view(torch.float32).view(-1, 2).numpy(), wire[8 * 5 :]
    codes = int.from_bytes(bytes(body.tolist()), "little")
    for i in range(n):
        unit, low = head[i // block]
        level = np.float32(codes >> width * i & (1 << width) - 1)
        assert float(out[i]) == np.float32(1) + (low + level * unit) * np.float32(-0.3)


BLOCKS = ((1, 1.0), (100, 1e-41), (512, 1e38), (10**6, 1e-20))


@over(first=range(8), block_factor=BLOCKS, segments=BUFFERS)
def test_all_targets_agree(first: int, block_factor: tuple[int, float], segments: Segments) -> None:
    """Every width, and several in one message."""
    (block, factor), n, keys = block_factor, segments.end + 9, keys_of(segments)
    x = (heavy(n, first) * factor).clamp(-LARGEST, LARGEST)
    for random in (False, True):
        form = form_of(*((first + i) % 8 + 1 for i in range(len(segments))), block=block, random=random)
        wire = agree(lambda f=form: kernels.minmax_encode(x, segments, keys, f))
        agree(lambda f=form, w=wire: kernels.minmax_add_(w, segments, torch.ones(n), f, -0.3))


@on_every_target
def test_the_last_eight_bits_of_the_dither_count(target: str) -> None:
    """A fraction of 2^-18 is rounded up where the dither is below 64, which 16 bits cannot tell."""
    n = 1 << 18 if target == "reference" else 1 << 21
    x = torch.full((n,), 2.0**-18)
    x[0], x[1] = 1.0, 0.0
    wire = kernels.minmax_encode(x, Segments.whole(n), [3], form_of(1, block=n, random=True))
    up = kernels.dither24(3, n)[2:] < 64
    assert torch.equal(kernels.unpack_bits(wire[8:], 1, n)[2:] == 1, up)
    assert target == "reference" or int(up.sum()) >= 4


@over(value=(0.0, -0.0, 0.1, -DENORMAL, 1e38 / 3, -(2.0**126)), stochastic=(False, True))
def test_a_constant_is_sent_as_it_is(value: float, stochastic: bool) -> None:
    x, whole, form = torch.full((700,), value), Segments.whole(700), form_of(4, random=stochastic)
    wire = agree(lambda: kernels.minmax_encode(x, whole, [1], form))
    assert not wire[16:].any()
    assert torch.equal(agree(lambda: kernels.minmax_add_(wire, whole, torch.zeros(700), form)), x)


@over(width=(1, 8))
def test_the_largest_numbers_are_cut_off_and_stay_finite(width: int) -> None:
    x, whole, form = torch.tensor([LARGEST, -LARGEST, 0.0, 1e38, -1e38]), Segments.whole(5), form_of(width)
    wire = agree(lambda: kernels.minmax_encode(x, whole, [1], form))
    out = agree(lambda: kernels.minmax_add_(wire, whole, torch.zeros(5), form))
    assert out[0] == out[3] == 2.0**126 and out[1] == out[4] == -(2.0**126)


@over(bad=(NAN, -NAN, INF, -INF), at=(0, 15, 511, 512, 9999))
def test_nan_and_inf_are_refused(bad: float, at: int) -> None:
    x, segments = spoilt(10_001, 1 + at, bad), Segments.consecutive([1, 10_000])
    match = r"tensor 1 of the message \(10000"
    refused(match, lambda: kernels.minmax_encode(x, segments, [1, 2], form_of(4, 4)), error=NonFiniteError)


def test_wires_that_no_encoder_makes_are_refused_before_a_write() -> None:
    segments, form, out = Segments.consecutive([10, 13]), form_of(4, 3), torch.zeros(23)
    wire = kernels.minmax_encode(torch.arange(23.0), segments, [0, 0], form)  # 8 + 5 and 8 + 5 bytes
    cases = [
        ("26 bytes is expected, got 25", wire[:-1]),
        ("26 bytes is expected, got 27", torch.cat([wire, wire[:1]])),
        ("must be zero", torch.cat([wire[:25], wire.new_tensor([0b10000000])])),
        ("a range of tensor 0 has no finite end", torch.cat([bytes_of(LARGEST), wire[4:]])),
    ]
    for at, value in ((0, -1.0), (0, -0.0), (13, INF), (13, NAN), (17, NAN), (4, -INF)):
        bad = torch.cat([wire[:at], bytes_of(value), wire[at + 4 :]])
        cases.append(("is negative, or a unit or min", bad))
    for match, bad in cases:
        refused(match, lambda b=bad: kernels.minmax_add_(b, segments, out, form))
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
