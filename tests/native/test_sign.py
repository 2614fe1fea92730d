"""Signs and means: against plain loops, alike on every target, and refused where no encoder made them."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from tests.cases import over

from .targets import (
    ALL,
    BUFFERS,
    DENORMAL,
    INF,
    LARGEST,
    NAN,
    agree,
    bytes_of,
    keys_of,
    normal,
    refused,
    spoilt,
)

BLOCKS = (0, 1, 5, 8, 37, 64, 4097)
CORNERS = torch.tensor([0.0, -0.0, DENORMAL, -DENORMAL, LARGEST, -LARGEST, 1.0, -1e-38])


def given(segments: Segments) -> Tensor:
    rng = torch.Generator().manual_seed(segments.numel)
    x = torch.randn(segments.end + 9, generator=rng) ** 3
    x[: len(CORNERS)] = CORNERS[: len(x)]
    return x


def by_hand(x: Tensor, segments: Segments, block: int) -> bytes:
    """Element by element, with exact sums."""
    wire = b""
    for view in segments.views(x):
        values, n = view.tolist(), view.numel()
        length = block or max(n, 1)
        for at in range(0, n, length):
            part = [abs(value) for value in values[at : at + length]]
            wire += struct.pack("<f", math.fsum(part) / len(part))
        bits = sum(1 << i for i, value in enumerate(values) if math.copysign(1, value) < 0)
        wire += bits.to_bytes((n + 7) // 8, "little")
    return wire


@over(block=BLOCKS, segments=BUFFERS)
def test_the_wire_is_means_and_signs(block: int, segments: Segments) -> None:
    """These sums do not lie on the edge between two float32, so any order of adding gives the same means."""
    x = given(segments)
    wire = agree(lambda: kernels.sign_encode(x, segments, block))
    assert bytes(wire.tolist()) == by_hand(x, segments, block)
    assert wire.numel() == sum(kernels.sign_nbytes(n, block) for n in segments.sizes)


@over(block=BLOCKS, segments=BUFFERS)
def test_decoding_adds_the_mean_with_its_sign(block: int, segments: Segments) -> None:
    alpha, x = -1 / 3, given(segments) / 4
    wire, start = kernels.sign_encode(x, segments, block), torch.linspace(-1, 1, len(x))
    expected, at = start.clone(), 0
    for view, n in zip(segments.views(expected), segments.sizes, strict=True):
        means = -(-n // (block or max(n, 1)))
        scales = torch.tensor(struct.unpack(f"<{means}f", bytes(wire[at : at + 4 * means].tolist())))
        bits = kernels.unpack_bits(wire[at + 4 * means :][: (n + 7) // 8], 1, n)
        values = scales.repeat_interleave(block or max(n, 1))[:n] * torch.tensor(alpha)
        view += torch.where(bits.bool(), -values, values)
        at += 4 * means + (n + 7) // 8
    got = agree(lambda: kernels.sign_add_(wire, segments, start.clone(), alpha, block))
    assert torch.equal(got, expected)
    assert kernels.sign_add_(wire, segments, start, alpha, block) is start


@over(block=(0, 100, 1024), seed=range(5))
def test_native_sums_are_the_same_bits_and_the_reference_is_within_one_ulp(block: int, seed: int) -> None:
    x, wires = normal(100_003, seed).exp(), []
    for name in ALL:
        with kernels.using(name):
            wires.append(kernels.sign_encode(x, Segments.whole(len(x)), block))
    means = len(wires[0]) - (len(x) + 7) // 8
    for wire in wires[1:]:
        assert torch.equal(wire, wires[1])
        ours, theirs = (each[:means].clone().view(torch.int32) for each in (wire, wires[0]))
        assert int((ours - theirs).abs().max()) <= 1


def test_signs_and_means_apart_are_those_of_the_message() -> None:
    segments = BUFFERS["neighbours"]
    x = given(segments)
    bits, means = agree(lambda: kernels.signs(x, segments))
    wire, parts, at = kernels.sign_encode(x, segments), [], 0
    for n, mean in zip(segments.sizes, means, strict=True):
        parts += [mean.view(1).view(torch.uint8)] if n else []
        parts += [bits[at : at + (n + 7) // 8]]
        at += (n + 7) // 8
    assert torch.equal(torch.cat(parts), wire) and means[2] == 0
    apart = agree(lambda: kernels.signed_add_(bits, means, segments, torch.ones_like(x), 0.5))
    assert torch.equal(apart, kernels.sign_add_(wire, segments, torch.ones_like(x), 0.5))


@over(n=range(70))
def test_zeros_have_bits(n: int) -> None:
    """Every length to 69, between other elements: -0.0 is zero, the least denormal is not."""
    x, segments = torch.tensor([1e-45, 0.0, -1.0, -0.0, 3.0, 0.0, 0.0]).repeat(40), Segments((3, 110), (n, 9))
    bits = agree(lambda: kernels.zeros(x, segments))
    assert bits.numel() == (n + 7) // 8 + 2
    for part, view in zip(torch.split(bits, [(n + 7) // 8, 2]), segments.views(x), strict=True):
        assert torch.equal(kernels.unpack_bits(part, 1, len(view)).bool(), view == 0)


@over(bad=(NAN, INF, -INF), at=(0, 15, 4095, 4096, 9999))
def test_nan_and_inf_have_no_mean(bad: float, at: int) -> None:
    x, segments = spoilt(10_001, 1 + at, bad), Segments.consecutive([1, 10_000])
    calls = [lambda b=block: kernels.sign_encode(x, segments, b) for block in (0, 7, 1024)]
    refused("NaN or Inf", *calls, error=NonFiniteError)
    finite = agree(lambda: kernels.signs(x, segments)[1].isfinite().tolist())
    assert finite == [True, False] and kernels.signs(x, segments)[1][0] == 1


def test_the_largest_numbers_have_a_mean() -> None:
    x, whole = torch.full((1001,), -LARGEST), Segments.whole(1001)
    wire = agree(lambda: kernels.sign_encode(x, whole, 100))
    out = agree(lambda: kernels.sign_add_(wire, whole, torch.zeros(1001), block=100))
    assert bool((out == -LARGEST).all())


def test_wires_that_no_encoder_makes_are_refused_before_a_write() -> None:
    segments, x, out = Segments.consecutive([10, 13]), torch.ones(23), torch.zeros(23)
    wire = kernels.sign_encode(x, segments, 8)  # 8 + 2 and 8 + 2 bytes
    cases = [
        ("fill 20 bytes, got 19", wire[:-1]),
        ("fill 20 bytes, got 21", torch.cat([wire, wire[:1]])),
        ("must be zero", torch.cat([wire[:19], wire.new_tensor([0b100000])])),
    ]
    for mean in (-1.0, -0.0, INF, NAN):
        cases.append(("negative or not finite", torch.cat([wire[:14], bytes_of(mean), wire[18:]])))
    for match, bad in cases:
        refused(match, lambda b=bad: kernels.sign_add_(b, segments, out, block=8))
    bits, values = kernels.signs(x, segments)
    match = "4 bytes of signs and 2 values, got 3 and 2"
    refused(match, lambda: kernels.signed_add_(bits[:3], values, segments, out))
    refused("must be zero", lambda: kernels.signed_add_(bits | 255, values, segments, out))
    assert not out.any()
    match = "block must not be negative"
    refused(match, lambda: kernels.sign_encode(x, segments, -1), error=ValueError)


@over(block=BLOCKS, segments={**BUFFERS, "long": Segments.consecutive([70, 0, 4096 + 3, 9000])})
def test_a_zero_has_the_sign_that_its_key_draws(block: int, segments: Segments) -> None:
    x, keys = given(segments), keys_of(segments)
    x[torch.arange(len(x)) % 3 == 0] = 0.0
    x[torch.arange(len(x)) % 7 == 0] = -0.0
    drawn = x.clone()
    for view, key in zip(segments.views(drawn), keys, strict=True):
        words = kernels.philox(key, len(view) // 32 + 1)
        coins = kernels.unpack_bits(words.view(torch.uint8), 1, 32 * len(words))[: len(view)]
        view.copy_(torch.where(view == 0, (1 - 2 * coins) * 0.0, view))

    def as_drawn() -> bool:
        own = kernels.sign_encode(x, segments, block, keys)
        return torch.equal(own, kernels.sign_encode(drawn, segments, block))

    assert agree(as_drawn)
