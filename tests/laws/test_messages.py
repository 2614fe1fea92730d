"""The laws of messages: many tensors of one buffer in one wire, each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.spec import parse

from .table import LIVE, given, same, specs

BUFFERS = {
    "none": Segments((), ()),
    "empty": Segments((3,), (0,)),
    "one": Segments.whole(257),
    "neighbours": Segments.consecutive([1, 30, 0, 7, 1001, 2]),
    "apart": Segments((5, 40, 700), (20, 513, 1)),
    "backwards": Segments((900, 300, 0), (77, 600, 299)),
}
pytestmark = [
    pytest.mark.parametrize("spec", specs(Codec)),
    pytest.mark.parametrize("buffer", BUFFERS),
]


@pytest.fixture(params=LIVE, autouse=True)
def live(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using(request.param):
        yield request.param


def inputs(buffer: str) -> tuple[Segments, Tensor, list[int]]:
    segments = BUFFERS[buffer]
    return segments, given("normal", segments.end + 9), [1000 + i for i in range(len(segments))]


def test_each_tensor_decodes_as_if_alone(spec: str, buffer: str) -> None:
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    alone = torch.zeros_like(x)
    for view, into, key in zip(segments.views(x), segments.views(alone), keys, strict=True):
        codec.decode_add_(codec.encode(view.clone(), key), into)
    wire = codec.encode_segments(x, segments, keys)
    assert same(codec.decode_segments_add_(wire, segments, torch.zeros_like(x)), alone)


def test_size_key_and_input(spec: str, buffer: str) -> None:
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    before = x.clone()
    wire = codec.encode_segments(x, segments, keys)
    most = codec.message_nbytes(segments)
    assert wire.dtype == torch.uint8 and wire.is_contiguous()
    assert wire.numel() == most if codec.fixed_size else wire.numel() <= most
    assert same(wire, codec.encode_segments(x, segments, keys))
    assert same(x, before)


def test_nothing_outside_the_segments_is_touched(spec: str, buffer: str) -> None:
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    wire = codec.encode_segments(x, segments, keys)
    outside = torch.ones(x.numel(), dtype=torch.bool)
    for view in segments.views(outside):
        view.fill_(False)
    out, memory = torch.full_like(x, 5.0), torch.full_like(x, 5.0)
    assert codec.decode_segments_add_(wire, segments, out, -0.5) is out
    assert codec.clear_segments_(wire, segments, memory) is memory
    assert bool((out[outside] == 5).all()) and bool((memory[outside] == 5).all())


def test_clear_zeroes_what_decode_touches(spec: str, buffer: str) -> None:
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    wire = codec.encode_segments(x, segments, keys)
    decoded = codec.decode_segments_add_(wire, segments, torch.zeros_like(x))
    memory = codec.clear_segments_(wire, segments, torch.ones_like(x))
    alone = torch.ones_like(x)
    for view, into, key in zip(segments.views(x), segments.views(alone), keys, strict=True):
        codec.clear_(codec.encode(view.clone(), key), into)
    assert same(memory, alone)
    assert not (decoded * memory).any()


def test_sent_and_kept_make_the_whole(spec: str, buffer: str) -> None:
    """x - sent + sent = x: what feedback keeps and what others get make the whole, up to one rounding."""
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    wire = codec.encode_segments(x, segments, keys)
    rest = codec.decode_segments_add_(wire, segments, x.clone(), -1.0)
    sent = codec.decode_segments_add_(wire, segments, torch.zeros_like(x))
    torch.testing.assert_close(rest + sent, x, rtol=1e-6, atol=1e-6)


def test_cut_and_damaged_messages(spec: str, buffer: str, live: str) -> None:
    codec, (segments, x, keys) = parse(spec), inputs(buffer)
    wire = codec.encode_segments(x, segments, keys)
    rng = torch.Generator().manual_seed(2)
    lengths = {int(torch.randint(0, wire.numel(), (1,), generator=rng)) for _ in range(8) if wire.numel()}
    for bad in (*(wire[:m] for m in lengths), torch.cat([wire, wire.new_zeros(1)])):
        with pytest.raises(WireError):
            codec.decode_segments_add_(bad, segments, x.clone())
    for _ in range((5 if live == "reference" else 15) if wire.numel() else 0):
        bad = wire.clone()
        bad[int(torch.randint(0, bad.numel(), (1,), generator=rng))] = int(
            torch.randint(0, 256, (1,), generator=rng)
        )
        for decode in (codec.decode_segments_add_, codec.clear_segments_):
            room = x.clone()
            try:
                decode(bad, segments, room)
            except WireError:
                assert same(room, x), "written before it was refused"
            assert bool(room.isfinite().all())
