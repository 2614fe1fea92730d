"""Wires for the fuzz: valid ones of every decoder, ways to damage them, and what must hold whatever arrives.

Every implementation of the kernels gets the same wire: all must refuse it, or all hand out the same bits.
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

from ..laws.table import given, same, specs

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
LARGEST, INF = 0x7F7FFFFF, 0x7F800000  # the bits of these in float32
WORDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, LARGEST, INF, INF | 2**31)


@dataclass(frozen=True)
class Decoder:
    """A way in: some valid wires, and what is done with a damaged one: `WireError`, or a checked result."""

    name: str
    wires: tuple[Tensor, ...]
    decode: Callable[[Tensor, random.Random], Tensor]


def attempt(seed: int, i: int, only: str = "") -> tuple[str, bool]:
    """Run case i; return its decoder and whether that refused. Raise anything but `WireError`.

    `only`: start of the names of the decoders to choose from.
    """
    rng = random.Random(f"{seed}/{i}")
    decoder = rng.choice(decoders(only))
    wire = damaged(rng.choice(decoder.wires), rng.choice(decoder.wires), rng)
    results: dict[str, Tensor | None] = {}
    try:
        for live in kernels.runnable():
            with kernels.using(live):
                results[live] = _decoded(decoder, wire, random.Random(f"{seed}/{i}/decode"))
        _alike(results)
    except Exception as error:
        raise AssertionError(
            f"case {i} of seed {seed}, {decoder.name}, {live}: wire {bytes(wire.tolist()).hex()}"
        ) from error
    return decoder.name, results[live] is None


def _decoded(decoder: Decoder, wire: Tensor, rng: random.Random) -> Tensor | None:
    """What a decoder hands out, which must be finite; None where it refuses."""
    try:
        got = decoder.decode(wire, rng)
    except WireError:
        return None
    assert bool(got.isfinite().all()), "handed out what is not finite"
    return got


def _alike(results: dict[str, Tensor | None]) -> None:
    """All implementations must refuse, or all hand out the same bits."""
    refused = [live for live, got in results.items() if got is None]
    assert len(refused) in (0, len(results)), f"of {list(results)} only {refused} refused"
    first, *others = results.values()
    for got in others:
        assert first is None or (got is not None and same(first, got)), "implementations hand out other bits"


def damaged(wire: Tensor, other: Tensor, rng: random.Random) -> Tensor:
    """A wire with a few changes, in memory of exactly its size."""
    data = bytearray(wire.numpy())
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
            data[4 * (at // 4) : 4 * (at // 4) + 4] = rng.choice(WORDS).to_bytes(4, "little")
        else:
            data[at:] = bytes(other.numpy())[at:]
    return torch.frombuffer(data, dtype=torch.uint8).clone() if data else wire_of_nothing()


@lru_cache
def decoders(only: str = "") -> tuple[Decoder, ...]:
    """Return one for each way that a wire can take into the package, if its name starts with `only`."""
    if only:
        return tuple(each for each in decoders() if each.name.startswith(only))
    codecs = [_codec(spec, buffer) for spec in specs(Codec) for buffer in BUFFERS]
    codings = [_coding(spec, buffer) for spec in specs(IndexCoding) for buffer in BUFFERS[1:]]
    packed = [
        _ternary(),
        _elias(),
        _error_bound("bins"),
        _error_bound("zeros"),
        *(_packed(bits) for bits in range(1, 33)),
    ]
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

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        if rng.random() < 0.25 and len(segments) == 1:
            return codec.decode(wire, segments.numel)
        out, clear = torch.full((n,), GUARD), rng.random() < 0.25
        try:
            if clear:
                codec.clear_segments_(wire, segments, out)
            else:
                codec.decode_segments_add_(wire, segments, out, rng.choice((1.0, -1.0, 0.25)))
        except WireError:
            assert bool((out == GUARD).all()), "written before it refused"
            raise
        assert bool((out[outside] == GUARD).all()), "written outside the segments"
        return out

    return Decoder(spec, wires, decode)


def _coding(spec: str, segments: Segments) -> Decoder:
    coding: IndexCoding = parse(spec)
    rng = torch.Generator().manual_seed(1)
    lists = [torch.arange(size)[torch.rand(size, generator=rng) < 0.1] for size in segments.sizes]
    counts = torch.tensor([part.numel() for part in lists])
    wire = coding.encode(torch.cat(lists).to(torch.int32), counts, segments)

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        said = counts.clone()
        if rng.random() < 0.2:
            said[rng.randrange(len(said))] += rng.choice((-1, 1, 100, -100, 2**31, 2**40))
        indices = coding.decode(wire, said, segments)
        assert kernels.ascending(indices, said, segments)
        again = coding.encode(indices, said, segments)
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"
        return indices

    return Decoder(spec, (wire,), decode)


def _packed(bits: int) -> Decoder:
    codes = [torch.arange(n, dtype=torch.int32) * 77 for n in (0, 1, 9, 100)]

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        n = max(0, 8 * wire.numel() // bits - rng.choice((0, 0, 0, 1, -1)))
        got = kernels.unpack_bits(wire, bits, n)
        assert torch.equal(kernels.pack_bits(got, bits), wire), "accepted, but not what an encoder makes"
        return got

    return Decoder("unpack_bits", tuple(kernels.pack_bits(each, bits) for each in codes), decode)


def _ternary() -> Decoder:
    levels = [torch.arange(n, dtype=torch.int32) * 7 % 3 - 1 for n in (0, 1, 9, 100)]

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        n = max(0, 5 * wire.numel() - rng.choice((0, 0, 0, 1, 4, -1, 5)))
        got = kernels.unpack_ternary(wire, n)
        assert torch.equal(kernels.pack_ternary(got), wire), "accepted, but not what an encoder makes"
        return got

    return Decoder("unpack_ternary", tuple(kernels.pack_ternary(each) for each in levels), decode)


def _error_bound(marks: str) -> Decoder:
    n = 700
    wires = [
        kernels.error_bound_encode(given(name, n).relu() if half else given(name, n), 0.03, marks)
        for name in ("normal", "spike", "zeros", "heavy")
        for half in (False, True)
    ]

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        return kernels.error_bound_decode(wire, rng.choice((n, n, n, n, 0, 1, 699, 10_000)))

    return Decoder("error_bound_decode", tuple(wires), decode)


def _elias() -> Decoder:
    values = [torch.arange(1, n + 1, dtype=torch.int32) ** 3 for n in (0, 1, 9, 1000)]

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        n = rng.choice((0, 1, 9, 9, 1000, 1000, 8 * wire.numel() + rng.choice((-1, 0, 1)), 2**40, -1))
        got = kernels.elias_decode(wire, n)
        assert torch.equal(kernels.elias_encode(got), wire), "accepted, but not what an encoder makes"
        return got

    return Decoder("elias_decode", tuple(kernels.elias_encode(each) for each in values), decode)


def _levels(name: str, most: int, segments: Segments) -> Decoder:
    coding, whole = CODINGS[name], Segments.consecutive(segments.sizes)
    levels = [
        (given(kind, whole.numel) * most / 3).round().clamp(-most, most).int() for kind in ("normal", "zeros")
    ]

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        got = coding.decode(wire, whole, most)
        assert not got.numel() or int(got.abs().max()) <= most
        assert torch.equal(coding.encode(got, whole, most), wire), "accepted, but not what an encoder makes"
        return got

    return Decoder(f"levels by {name}", tuple(coding.encode(each, whole, most) for each in levels), decode)


def _signed(segments: Segments) -> Decoder:
    """Sign bits that come without means, as those of a vote."""
    bits, values = kernels.signs(given("normal", segments.end + 5), segments)

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
        out = torch.zeros(segments.end + 5)
        kernels.signed_add_(wire, values, segments, out, 0.5)
        again, _ = kernels.signs(out, segments)
        assert torch.equal(again, wire), "accepted, but not what an encoder makes"
        assert int(out.count_nonzero()) == segments.numel, "each element has its value, and nothing else has"
        return out

    return Decoder("signed_add_", (bits if bits.numel() else wire_of_nothing(),), decode)


def _scattered(segments: Segments) -> Decoder:
    """Positions that no coding has checked."""
    counts = torch.tensor([min(size, 3) for size in segments.sizes])
    first = torch.cat([torch.arange(int(k), dtype=torch.int32) for k in counts])

    def decode(wire: Tensor, rng: random.Random) -> Tensor:
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
        return out

    return Decoder("scatter", (first.view(torch.uint8) if first.numel() else wire_of_nothing(),), decode)


def wire_of_nothing() -> Tensor:
    """No bytes at all."""
    return torch.empty(0, dtype=torch.uint8)
