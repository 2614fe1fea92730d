"""The laws of messages: many tensors of one buffer in one wire, each as if it were alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.spec import parse
from tests.cases import over

from .table import given, same, specs

BUFFERS = {
    "none": Segments((), ()),
    "empty": Segments((3,), (0,)),
    "one": Segments.whole(257),
    "neighbours": Segments.consecutive([1, 30, 0, 7, 1001, 2]),
    "apart": Segments((5, 40, 700), (20, 513, 1)),
    "backwards": Segments((900, 300, 0), (77, 600, 299)),
}
every_message = over(spec=specs(Codec), segments=BUFFERS)
Message = tuple[Codec, Tensor, list[int], Tensor, Tensor]


@cache
def message(spec: str, segments: Segments) -> Message:
    """The codec, its input, the keys, the wire and the decoded message, made once for all laws."""
    codec: Codec = parse(spec)
    x, keys = given("normal", segments.end + 9), [1000 + i for i in range(len(segments))]
    wire = codec.encode_segments(x, segments, keys)
    return codec, x, keys, wire, codec.decode_segments_add_(wire, segments, torch.zeros_like(x))


@every_message
def test_each_tensor_decodes_and_clears_as_if_alone(spec: str, segments: Segments) -> None:
    codec, x, keys, wire, decoded = message(spec, segments)
    alone, memory_alone = torch.zeros_like(x), torch.ones_like(x)
    parts = (segments.views(each) for each in (x, alone, memory_alone))
    wires = [wire[:0]]
    for view, into, memory, key in zip(*parts, keys, strict=True):
        one = codec.encode(view.clone(), key)
        wires.append(one)
        codec.decode_add_(one, into)
        codec.clear_(one, memory)
    assert same(decoded, alone)
    assert same(wire, torch.cat(wires)) or not codec.concatenates
    memory = codec.clear_segments_(wire, segments, torch.ones_like(x))
    assert same(memory, memory_alone)
    assert not (decoded * memory).any()


@every_message
def test_size_key_and_input(spec: str, segments: Segments) -> None:
    codec, x, keys, wire, _ = message(spec, segments)
    most = codec.message_nbytes(segments)
    assert wire.dtype == torch.uint8 and wire.is_contiguous()
    assert wire.numel() == most if codec.fixed_size else wire.numel() <= most
    assert same(wire, codec.encode_segments(x, segments, keys))
    assert same(x, given("normal", segments.end + 9))


@every_message
def test_nothing_outside_the_segments_is_touched(spec: str, segments: Segments) -> None:
    codec, x, _, wire, _ = message(spec, segments)
    outside = torch.ones(x.numel(), dtype=torch.bool)
    for view in segments.views(outside):
        view.fill_(False)
    out, memory = torch.full_like(x, 5.0), torch.full_like(x, 5.0)
    assert codec.decode_segments_add_(wire, segments, out, -0.5) is out
    assert codec.clear_segments_(wire, segments, memory) is memory
    assert bool((out[outside] == 5).all()) and bool((memory[outside] == 5).all())


@every_message
def test_sent_and_residual_make_the_whole(spec: str, segments: Segments) -> None:
    """x - sent + sent = x, up to one rounding: feedback keeps exactly what the others did not get."""
    codec, x, _, wire, sent = message(spec, segments)
    rest = codec.decode_segments_add_(wire, segments, x.clone(), -1.0)
    torch.testing.assert_close(rest + sent, x, rtol=1e-6, atol=1e-6)


@every_message
def test_cut_and_damaged_messages(spec: str, segments: Segments) -> None:
    codec, x, _, wire, _ = message(spec, segments)
    rng = torch.Generator().manual_seed(2)
    lengths = {int(torch.randint(0, wire.numel(), (1,), generator=rng)) for _ in range(8) if wire.numel()}
    for bad in (*(wire[:m] for m in lengths), torch.cat([wire, wire.new_zeros(1)])):
        with pytest.raises(WireError):
            codec.decode_segments_add_(bad, segments, x.clone())
    for _ in range(15 if wire.numel() else 0):
        bad = wire.clone()
        at, byte = (int(torch.randint(0, most, (1,), generator=rng)) for most in (bad.numel(), 256))
        bad[at] = byte
        for decode in (codec.decode_segments_add_, codec.clear_segments_):
            room = x.clone()
            try:
                decode(bad, segments, room)
            except WireError:
                assert same(room, x), "written before it was refused"
            assert bool(room.isfinite().all())
