"""Scatter-reduce against plain loops: each piece by itself, from the definitions, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.laws.worlds import everywhere, exchange_on
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.comm.partition import BLOCK
from laconic.core.codec import Codec
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn, mix
from laconic.reducers.scatter_reduce import Pattern, ScatterReduce, hops
from laconic.reducers.scatter_reduce.cuts import cuts
from laconic.reducers.scatter_reduce.two_halves import ANSWER

MODEL = Layout.of([("w", (70, 90)), ("v", (33, 41)), ("one", ()), ("none", (0, 3)), ("b", (40,))])
PATTERNS = ("direct", "ring", "tree")
CODECS = ("minmax()", "minmax(bits=3, block=100, rounding='stochastic')", "natural()", "dense()")
STEP, SEED = 3, 1
SIZES = (1, 2, 4, 5, 8)
MIXED = [(CODECS[(i + j) % 4], pattern, n) for i, pattern in enumerate(PATTERNS) for j, n in enumerate(SIZES)]


def x_of(rank: int, layout: Layout = MODEL) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank)) ** 3


def play(spec: str, size: int, layout: Layout = MODEL, alpha: float = 1.0):  # type: ignore[no-untyped-def]
    """out, sent and payload of each rank."""

    def body(comm: Loopback) -> tuple[Tensor, Tensor, int]:
        metered = Metered(comm)
        out = torch.zeros(layout.numel)
        bound = parse(spec).bind(layout, metered)
        sent = bound.reduce(x_of(comm.rank, layout), layout, Turn(STEP, comm.rank, SEED), out, alpha)
        assert sent is not None
        return out, sent.add_to_(torch.zeros(layout.numel)), metered.snapshot().payload_sent

    return Loopback.run(size, body)


def rounded(codec: Codec, x: Tensor, name: str, rank: int, seed: int = SEED) -> Tensor:
    """What others decode of this rank's x."""
    return codec.decode(codec.encode(x.clone(), Turn(STEP, rank, seed).own(name)), x.numel())


def direct(codec: Codec, parts: list[Tensor], name: str, home: int) -> Tensor:
    mean = parts[home] / len(parts)
    for rank, part in enumerate(parts):
        if rank != home:
            wire = codec.encode(part.clone(), Turn(STEP, rank, SEED).own(name))
            codec.decode_add_(wire, mean, 1 / len(parts))
    return mean


def ring(codec: Codec, parts: list[Tensor], name: str, home: int) -> Tensor:
    size = len(parts)
    rank = (home + 1) % size
    mean = parts[rank] / size
    while rank != home:
        came = rounded(codec, mean, name, rank)
        rank = (rank + 1) % size
        mean = parts[rank] / size + came
    return mean


def tree(codec: Codec, parts: list[Tensor], name: str, home: int) -> Tensor:
    """Rank `home + place` has the sum of its subtree once the ranks 1, 2, 4... behind it have handed over."""
    size = len(parts)

    def subtree(place: int) -> Tensor:
        mean = parts[(home + place) % size] / size
        distance = 1
        while place % (2 * distance) == 0 and distance < size:
            if place + distance < size:
                sender = (home + place + distance) % size
                mean = mean + rounded(codec, subtree(place + distance), name, sender)
            distance *= 2
        return mean

    return subtree(0)


@for_each("spec, pattern, size", MIXED)
def test_each_piece_is_what_the_definition_makes_of_it(spec: str, pattern: str, size: int) -> None:
    codec, expected = parse(spec), torch.zeros(MODEL.numel)
    bounds = cuts(MODEL, size)
    for entry in MODEL:
        for home in range(size):
            begin, end = bounds[entry.name][home : home + 2]
            where = slice(entry.offset + begin, entry.offset + end)
            if begin < end:
                name, parts = f"{entry.name}[{begin}:{end}]", [x_of(rank)[where] for rank in range(size)]
                mean = {"direct": direct, "ring": ring, "tree": tree}[pattern](codec, parts, name, home)
                expected[where] = 2.5 * rounded(codec, mean, name, home, mix(SEED, ANSWER))
    for out, _, _ in play(f"scatter_reduce({spec}, pattern={pattern!r})", size, alpha=2.5):
        assert torch.equal(out, expected)


@for_each("size", [1, 2, 5])
def test_what_was_sent_is_exact_at_home_and_rounded_elsewhere(size: int) -> None:
    bounds, codec = cuts(MODEL, size), parse("minmax(bits=3)")
    for rank, (_, sent, _) in enumerate(play("scatter_reduce(minmax(bits=3))", size)):
        for entry in MODEL:
            for home in range(size):
                begin, end = bounds[entry.name][home : home + 2]
                where = slice(entry.offset + begin, entry.offset + end)
                x = x_of(rank)[where]
                assert torch.equal(sent[where], x if home == rank else codec.decode(codec.encode(x), len(x)))


@for_each("pattern", PATTERNS)
@for_each("size", [1, 2, 5])
def test_a_rank_hands_over_each_piece_once(pattern: str, size: int) -> None:
    """4 bits and 8 bytes for 512 elements, of whole buckets: as much however many ranks there are."""
    layout = Layout.of([("w", (64, BLOCK)), ("v", (100 * BLOCK,))])
    for _, _, payload in play(f"scatter_reduce(minmax(), pattern={pattern!r})", size, layout):
        assert payload == 164 * (BLOCK // 2 + 8) + 4 * (pattern != "direct")


def test_ranks_are_equally_loaded() -> None:
    """To a few blocks, over the whole model, whatever its tensors are; and no element is left out."""
    layout = Layout.of([(f"t{i}", (37 * i * i % 9001 + 1,)) for i in range(200)] + [("large", (10**7,))])
    for size in (1, 2, 5, 8, 64):
        bounds = cuts(layout, size)
        loads = [sum(bound[rank + 1] - bound[rank] for bound in bounds.values()) for rank in range(size)]
        assert sum(loads) == layout.numel and max(loads) - min(loads) <= 16 * BLOCK
        for entry in layout:
            assert bounds[entry.name][0] == 0 and bounds[entry.name][-1] == entry.numel
            assert all(bound % BLOCK == 0 or bound == entry.numel for bound in bounds[entry.name])


@for_each("pattern", PATTERNS)
def test_more_ranks_than_elements_and_one_tensor_larger_than_all(pattern: str) -> None:
    for layout, size in ((Layout.of([("w", (1, 3))]), 5), (Layout.of([("w", (1000, 1000)), ("b", (2,))]), 2)):
        plain = sum(x_of(rank, layout).double() for rank in range(size)) / size
        results = play(f"scatter_reduce(minmax(bits=8), pattern={pattern!r})", size, layout)
        for out, _, _ in results:
            assert torch.equal(out, results[0][0])
            assert (out - plain).norm() < 0.03 * plain.norm()


@for_each("size", [4, 8])
def test_what_is_rounded_at_every_rank_of_a_ring_errs_most(size: int) -> None:
    plain = sum(x_of(rank).double() for rank in range(size)) / size
    error = {
        pattern: float((play(f"scatter_reduce(minmax(), pattern={pattern!r})", size)[0][0] - plain).norm())
        for pattern in PATTERNS
    }
    assert max(error["direct"], error["tree"]) < 0.95 * error["ring"] < 0.5 * plain.norm()


@dataclass(frozen=True, repr=False)
class Swelling(Dense):
    """Decodes to 8 times what was encoded."""

    name: ClassVar[str] = "swelling"

    def decode_segments_add_(
        self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0
    ) -> Tensor:
        return super().decode_segments_add_(wire, segments, out, 8 * alpha)


@for_each("pattern", PATTERNS)
@for_each("size", [2, 5])
def test_a_sum_that_overflows_on_the_way_is_void_everywhere(pattern: Pattern, size: int) -> None:
    def body(comm: Loopback) -> bool:
        x, out = torch.full((MODEL.numel,), 3e38), torch.zeros(MODEL.numel)
        bound = ScatterReduce(Swelling(), pattern).bind(MODEL, comm)
        return bound.reduce(x, MODEL, Turn(0, comm.rank), out) is None

    assert Loopback.run(size, body) == [True] * size


@for_each("pattern", PATTERNS)
def test_a_damaged_message_names_its_rank(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a damaged length: of a codec without fixed size, a hop's message says how long its wire is."""
    codec = parse("minmax()")
    encode, frame = type(codec).encode_layout, hops.framed

    def damaged(self, x, layout, turn):  # type: ignore[no-untyped-def]
        wire = encode(self, x, layout, turn)
        if turn.rank == 1:
            wire[:4] = 255
        return wire

    def damaged_length(wire: Tensor, codec: Codec, layout: Layout) -> Tensor:
        message = frame(wire, codec, layout)
        message[:8] = 255  # -1
        return message

    monkeypatch.setattr(type(codec), "encode_layout", damaged)
    words = "the message that rank 1 sent is damaged: a unit of tensor 0"
    refuses(WireError, words, play, f"scatter_reduce(minmax(), pattern={pattern!r})", 3)
    monkeypatch.setattr(hops, "framed", damaged_length)
    words = r"that rank \d sent is damaged: a wire of -1 bytes in a message of"
    if pattern != "direct":
        spec = f"scatter_reduce(sparse(topk(density=0.1)), pattern={pattern!r}, feedback='both')"
        refuses(WireError, words, play, spec, 3)


def test_what_cannot_be_reduced_like_this_is_refused() -> None:
    for spec, says in (
        ("sparse(topk(density=0.1))", "drops entries.* take server"),
        ("qsgd(coding='rice'), pattern='ring'", "fixed size.*set pattern='direct'"),
        ("minmax(), pattern='star'", "must be 'direct', 'ring' or 'tree', got 'star'"),
        ("topk(density=0.1)", "must be a codec, such as minmax"),
    ):
        refuses(SpecError, says, parse, f"scatter_reduce({spec})")
    everywhere(2, lambda comm: exchange_on(comm, "error_fed(scatter_reduce(minmax(bits=8)))"))
    for pattern in ("ring", "tree"):
        spec = f"scatter_reduce(minmax(bits=8), pattern={pattern!r})"
        assert parse(spec).feedback_codec() is None
        words = "each hop rounds a sum of several ranks' gradients"
        refuses(
            SpecError, words, everywhere, 2, lambda comm, spec=spec: exchange_on(comm, f"error_fed({spec})")
        )
