"""Signs and means: against plain loops, alike on every target, and refused where no encoder made them."""

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
NATIVE = ALL[1:]
BLOCKS = (0, 1, 5, 8, 37, 64, 4097)
BUFFERS = (
    Segments.whole(0),
    Segments.whole(1),
    Segments.whole(5_003),
    Segments.consecutive([1, 7, 0, 8, 9, 4095, 4097, 64]),
    Segments((900, 300, 0), (77, 600, 299)),
)
LARGEST, DENORMAL = torch.finfo(torch.float32).max, 2.0**-149
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
def test_the_wire_is_means_and_signs(name: str, block: int, segments: Segments) -> None:
    """These sums do not lie on the edge between two float32, so any order of adding gives the same means."""
    x = given(segments)
    with kernels.using(name):
        wire = kernels.sign_encode(x, segments, block)
    assert bytes(wire.tolist()) == by_hand(x, segments, block)
    assert wire.numel() == sum(kernels.sign_nbytes(n, block) for n in segments.sizes)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
def test_decoding_adds_the_mean_with_its_sign(name: str, block: int, segments: Segments) -> None:
    alpha = -1 / 3
    x = given(segments) / 4
    with kernels.using("reference"):
        wire = kernels.sign_encode(x, segments, block)
    expected = torch.linspace(-1, 1, len(x))
    out = expected.clone()
    at = 0
    for view, n in zip(segments.views(expected), segments.sizes, strict=True):
        means = -(-n // (block or max(n, 1)))
        scales = torch.tensor(struct.unpack(f"<{means}f", bytes(wire[at : at + 4 * means].tolist())))
        bits = int.from_bytes(bytes(wire[at + 4 * means :][: (n + 7) // 8].tolist()), "little")
        for i in range(n):
            value = scales[i // (block or n)] * torch.tensor(alpha)
            view[i] += -value if bits >> i & 1 else value
        at += 4 * means + (n + 7) // 8
    with kernels.using(name):
        assert kernels.sign_add_(wire, segments, out, alpha, block) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("block", [0, 100, 1024])
def test_native_sums_are_the_same_bits_and_the_reference_is_within_one_ulp(block: int) -> None:
    for seed in range(5):
        x = torch.randn(100_003, generator=torch.Generator().manual_seed(seed)).exp()
        whole = Segments.whole(len(x))
        wires = {}
        for name in ALL:
            with kernels.using(name):
                wires[name] = kernels.sign_encode(x, whole, block)
        for name in NATIVE:
            assert torch.equal(wires[name], wires[NATIVE[0]])
            means = len(wires[name]) - (len(x) + 7) // 8
            ours, theirs = (wires[each][:means].clone().view(torch.int32) for each in (name, "reference"))
            assert int((ours - theirs).abs().max()) <= 1


@pytest.mark.parametrize("name", ALL)
def test_signs_and_means_apart_are_those_of_the_message(name: str) -> None:
    segments = BUFFERS[3]
    x = given(segments)
    with kernels.using(name):
        bits, means = kernels.signs(x, segments)
        wire = kernels.sign_encode(x, segments)
        parts, at = [], 0
        for n, mean in zip(segments.sizes, means, strict=True):
            parts += [mean.view(1).view(torch.uint8)] if n else []
            parts += [bits[at : at + (n + 7) // 8]]
            at += (n + 7) // 8
        assert torch.equal(torch.cat(parts), wire) and means[2] == 0
        one, other = torch.ones_like(x), torch.ones_like(x)
        kernels.signed_add_(bits, means, segments, one, 0.5)
        kernels.sign_add_(wire, segments, other, 0.5)
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ALL)
def test_zeros_have_bits(name: str) -> None:
    """Every length to 69, between other elements: -0.0 is zero, the least denormal is not."""
    x = torch.tensor([1e-45, 0.0, -1.0, -0.0, 3.0, 0.0, 0.0]).repeat(40)
    for n in range(70):
        segments = Segments((3, 110), (n, 9))
        with kernels.using(name):
            bits = kernels.zeros(x, segments)
        views = segments.views(x)
        assert bits.numel() == (n + 7) // 8 + 2
        for part, view in zip(torch.split(bits, [(n + 7) // 8, 2]), views, strict=True):
            assert torch.equal(kernels.unpack_bits(part, 1, len(view)).bool(), view == 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 15, 4095, 4096, 9999])
def test_what_is_not_finite_is_no_number(name: str, bad: float, at: int) -> None:
    x, segments = torch.ones(10_001), Segments.consecutive([1, 10_000])
    x[1 + at] = bad
    with kernels.using(name):
        for block in (0, 7, 1024):
            with pytest.raises(NonFiniteError, match="NaN or Inf"):
                kernels.sign_encode(x, segments, block)
        _, means = kernels.signs(x, segments)
        assert means[0] == 1 and not means[1].isfinite()


@pytest.mark.parametrize("name", ALL)
def test_the_largest_numbers_have_a_mean(name: str) -> None:
    with kernels.using(name):
        wire = kernels.sign_encode(torch.full((1001,), -LARGEST), Segments.whole(1001), 100)
        out = kernels.sign_add_(wire, Segments.whole(1001), torch.zeros(1001), block=100)
    assert bool((out == -LARGEST).all())


@pytest.mark.parametrize("name", ALL)
def test_what_no_encoder_made_is_refused_before_a_write(name: str) -> None:
    segments = Segments.consecutive([10, 13])
    x = torch.ones(23)
    with kernels.using(name):
        wire = kernels.sign_encode(x, segments, 8)  # 8 + 2 and 8 + 2 bytes
        cases = [
            ("fill 20 bytes, got 19", wire[:-1]),
            ("fill 20 bytes, got 21", torch.cat([wire, wire[:1]])),
            ("must be zero", torch.cat([wire[:19], wire.new_tensor([0b100000])])),
        ]
        for value in (-1.0, -0.0, math.inf, math.nan):
            mean = torch.tensor([value]).view(torch.uint8)
            cases.append(("negative or not finite", torch.cat([wire[:14], mean, wire[18:]])))
        for says, bad in cases:
            out = torch.zeros(23)
            with pytest.raises(WireError, match=says):
                kernels.sign_add_(bad, segments, out, block=8)
            assert not out.any()
        bits, values = kernels.signs(x, segments)
        with pytest.raises(WireError, match="4 bytes of signs and 2 values, got 3 and 2"):
            kernels.signed_add_(bits[:3], values, segments, x)
        with pytest.raises(WireError, match="must be zero"):
            kernels.signed_add_(bits | 255, values, segments, x)
        with pytest.raises(ValueError, match="block must not be negative"):
            kernels.sign_encode(x, segments, -1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("segments", [*BUFFERS, Segments.consecutive([70, 0, 4096 + 3, 9000])])
def test_a_zero_has_the_sign_that_its_key_draws(name: str, block: int, segments: Segments) -> None:
    x = given(segments)
    x[torch.arange(len(x)) % 3 == 0] = 0.0
    x[torch.arange(len(x)) % 7 == 0] = -0.0
    keys = [2**64 - 1 - s for s in range(len(segments))]
    drawn = x.clone()
    for view, key in zip(segments.views(drawn), keys, strict=True):
        words = kernels.philox(key, len(view) // 32 + 1).tolist()
        coins = torch.tensor([-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(len(view))])
        view.copy_(torch.where(view == 0, coins * 0.0, view))
    with kernels.using(name):
        assert torch.equal(
            kernels.sign_encode(x, segments, block, keys), kernels.sign_encode(drawn, segments, block)
        )
