"""Wires for the fuzz: valid ones of every decoder, ways to damage them, and what must hold whatever arrives.

Case i of a seed is always the same: `attempt(seed, i)` repeats one alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.qsgd.level_codings import CODINGS
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import parse

from ..laws.table import given, specs

GUARD = 7.0  # what lies around and between the segments, and must still lie there
BUFFERS = (
    Segments.whole(0),
    Segments.whole(1),
    Segments.whole(130),
    Segments.whole(3000),
    Segments.consecutive([1, 30, 0, 7, 501, 2]),
    Segments((500, 5, 60), (700, 40, 1)),
)
CORNERS = (0, 1, 2, 127, 128, 254, 255)


@dataclass(frozen=True)
class Decoder:
    """A way in: some valid wires, and what is done with a damaged one: `WireError`, or a checked result."""

    name: str
    wires: tuple[Tensor, ...]
    decode: Callable[[Tensor, random.Random], None]


def attempt(seed: int, i: int) -> tuple[str, bool]:
    """Decoder and whether it refused, of case i. Anything but `WireError` and a valid result is raised."""
    rng = random.Random(f"{seed}/{i}")
    decoder = rng.choice(decoders())
    wire = damaged(rng.choice(decoder.wires), rng.choice(decoder.wires), rng)
    with kernels.using(rng.choice(kernels.runnable())):
        try:
            decoder.decode(wire, rng)
        except WireError:
            return decoder.name, True
        except Exception as error:
            raise AssertionError(
                f"case {i} of seed {seed}, {decoder.name}: wire {bytes(wire.tolist()).hex()}"
            ) from error
    return decoder.name, False


def damaged(wire: Tensor, other: Tensor, rng: random.Random) -> Tensor:
    """A wire with a few changes, in memory of exactly its size."""
    data = bytearray(wire.tolist())
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        kind, at = rng.randrange(10), rng.randrange(len(data) + 1)
        if kind <= 2 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind <= 4 and data:
            data[at % len(data)] = rng.choice(CORNERS)
        elif kind == 5:
            del data[at:]
        elif kind == 6:
            data[at:at] = rng.randbytes(rng.choice((1, 1, 4, 9)))
        elif kind == 7:
            del data[at : at + rng.choice((1, 4, 8))]
        elif kind == 8:
            data[4 * (at // 4) : 4 * (at // 4) + 4] = rng.choice(
                (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
            ).to_bytes(4, "little")
        else:
            data[at:] = bytes(other.tolist())[at:]
    return torch.tensor(list(data), dtype=torch.uint8)


@lru_cache(maxsize=1)
def decoders() -> tuple[Decoder, ...]:
    """One for each way that a wire can take into the package."""
    codecs = [_codec(spec, buffer) for spec in specs(Codec) for buffer in BUFFERS]
    codings = [_coding(spec, buffer) for spec in specs(IndexCoding) for buffer in BUFFERS[1:]]
    packed = [_ternary(), _elias(), *(_packed(bits) for bits in range(1, 33))]
    levels = [_levels(name, most, buffer) for name in CODINGS for most in (1, 100) for buffer in BUFFERS]
    loose = [kind(buffer) for kind in (_scattered, _signed) for buffer in BUFFERS]
    return (*codecs, *codings, *packed, *levels, *loose)


def _codec(spec: str, segments: Segments) -> Decoder:
    codec: Codec = parse(spec)
    n, keys = segments.end + 5, list(range(len(segments)))
    wires = tuple(
        codec.encode_segments(given(name, n), segments, keys) for name in ("normal", "spike", "zeros")
    )
    outside = torch.ones(n, dtype=torch.bool)
    for view in segments.views(outside):
        view.fill_(False)

    def decode(wire: Tensor, rng: random.Random) -> None:
        out = torch.full((n,), GUARD)
        if rng.random() < 0.25:
            codec.clear_segments_(wire, segments, out)
        elif rng.random() < 0.5 and len(segments) == 1:
            assert codec.decode(wire, segments.numel).shape == (segments.numel,)
        else:
            codec.decode_segments_add_(wire, segments, out, rng.choice((1.0, -1.0, 0.25)))
        assert bool((out[outside] == GUARD).all()), "written outside the segments"

    return Decoder(spec, wires, decode)


def _coding(spec: str, segments: Segments) -> Decoder:
    coding: IndexCoding = parse(spec)
    rng = torch.Generator().manual_seed(1)
    lists = [torch.arange(size)[torch.rand(size, generator=rng) < 0.1] for size in segments.sizes]
    counts = torch.tensor([part.numel() for part in lists])
    wire = coding.encode(torch.cat(lists).to(torch.int32), counts, segments)

    def decode(wire: Tensor, rng: random.Random) -> None:
        said = counts.clone()
        if rng.random() < 0.2:
            said[rng.randrange(len(said))] += rng.choice((-1, 1, 100, -100, 2**31, 2**40))
        indices = coding.decode(wire, said, segments)
        assert kernels.ascending(indices, said, segments)
        again = coding.encode(indices, said, segments)
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"

    return Decoder(spec, (wire,), decode)


def _packed(bits: int) -> Decoder:
    codes = [torch.arange(n, dtype=torch.int32) * 77 for n in (0, 1, 9, 100)]

    def decode(wire: Tensor, rng: random.Random) -> None:
        n = max(0, 8 * wire.numel() // bits - rng.choice((0, 0, 0, 1, -1)))
        again = kernels.pack_bits(kernels.unpack_bits(wire, bits, n), bits)
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"

    return Decoder("unpack_bits", tuple(kernels.pack_bits(each, bits) for each in codes), decode)


def _ternary() -> Decoder:
    levels = [torch.arange(n, dtype=torch.int32) * 7 % 3 - 1 for n in (0, 1, 9, 100)]

    def decode(wire: Tensor, rng: random.Random) -> None:
        n = max(0, 5 * wire.numel() - rng.choice((0, 0, 0, 1, 4, -1, 5)))
        again = kernels.pack_ternary(kernels.unpack_ternary(wire, n))
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"

    return Decoder("unpack_ternary", tuple(kernels.pack_ternary(each) for each in levels), decode)


def _elias() -> Decoder:
    values = [torch.arange(1, n + 1, dtype=torch.int32) ** 3 for n in (0, 1, 9, 1000)]

    def decode(wire: Tensor, rng: random.Random) -> None:
        n = rng.choice((0, 1, 9, 9, 1000, 1000, 8 * wire.numel() + rng.choice((-1, 0, 1)), 2**40, -1))
        again = kernels.elias_encode(kernels.elias_decode(wire, n))
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"

    return Decoder("elias_decode", tuple(kernels.elias_encode(each) for each in values), decode)


def _levels(name: str, most: int, segments: Segments) -> Decoder:
    coding, whole = CODINGS[name], Segments.consecutive(segments.sizes)
    levels = [
        (given(kind, whole.numel) * most / 3).round().clamp(-most, most).int() for kind in ("normal", "zeros")
    ]

    def decode(wire: Tensor, rng: random.Random) -> None:
        got = coding.decode(wire, whole, most)
        assert not got.numel() or int(got.abs().max()) <= most
        assert torch.equal(coding.encode(got, whole, most), wire), "accepted, but not what an encoder makes"

    return Decoder(f"levels by {name}", tuple(coding.encode(each, whole, most) for each in levels), decode)


def _signed(segments: Segments) -> Decoder:
    """Sign bits that come without means, as those of a vote."""
    bits, values = kernels.signs(given("normal", segments.end + 5), segments)

    def decode(wire: Tensor, rng: random.Random) -> None:
        out = torch.zeros(segments.end + 5)
        kernels.signed_add_(wire, values, segments, out, 0.5)
        again, _ = kernels.signs(out, segments)
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"
        assert int(out.count_nonzero()) == segments.numel, "each element has its value, and nothing else has"

    return Decoder("signed_add_", (bits if bits.numel() else wire_of_nothing(),), decode)


def _scattered(segments: Segments) -> Decoder:
    """Positions that no coding has checked."""
    counts = torch.tensor([min(size, 3) for size in segments.sizes])
    first = torch.cat([torch.arange(int(k), dtype=torch.int32) for k in counts])

    def decode(wire: Tensor, rng: random.Random) -> None:
        indices = wire[: 4 * (wire.numel() // 4)].clone().view(torch.int32)
        said = counts.clone()
        said[0] += indices.numel() - int(counts.sum())
        out = torch.full((segments.end,), GUARD)
        if rng.random() < 0.3:
            kernels.scatter_zero_(out, segments, indices, said)
        elif rng.random() < 0.5:
            assert kernels.gather(out, segments, indices, said).shape == indices.shape
        else:
            kernels.scatter_add_(out, segments, indices, said, torch.ones(indices.numel()), 0.5)

    return Decoder("scatter", (first.view(torch.uint8) if first.numel() else wire_of_nothing(),), decode)


def wire_of_nothing() -> Tensor:
    """No bytes at all."""
    return torch.empty(0, dtype=torch.uint8)
