"""Messages of different tensors on the stand-in device: decoded as one, and a damaged one is found."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from laconic import kernels
from laconic.comm.messages import SentMessage, add_messages_
from laconic.core.codec import Codec
from laconic.core.deferred import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.spec import parse
from tests.device.worlds import CPU, GPU
from tests.laws.table import given, same

RANGES = (
    Segments((0, 300), (200, 70)),
    Segments((5,), (0,)),
    Segments((400,), (513,)),
    Segments((200,), (99,)),
)
SENDERS = (4, 5, 6, 7)
BOOKS = ("quantile(bins=16)", "hierarchy(levels=3)", "logquant(levels=4)")
SPECS = ("sign()", "signmean()", "natural()", "natural(bits=8)", "qsgd(levels=7)", "minmax(bits=4)")


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with kernels.using("reference"):
        yield


def messages(codec: Codec, device: torch.device) -> list[SentMessage]:
    """Return a message of each range; one without elements carries the byte that a group sends for it."""
    x, made = given("normal", 1000), []
    for segments in RANGES:
        wire = codec.encode_segments(x, segments, range(len(segments)))
        made.append(
            SentMessage(codec, wire if segments.numel else torch.zeros(1, dtype=torch.uint8), segments)
        )
    return [SentMessage(codec, each.wire.to(device), each.segments) for each in made]


def total(codec: Codec, given: list[SentMessage], device: torch.device) -> torch.Tensor:
    return add_messages_(torch.ones(1000, device=device), zip(SENDERS, given, strict=True), 0.5)


@pytest.mark.parametrize("spec", SPECS)
def test_their_sum_is_that_of_the_cpu_in_one_call(spec: str) -> None:
    codec = parse(spec)
    expected = total(codec, messages(codec, CPU), CPU)
    with mock.patch.object(type(codec), "decode_segments_add_", side_effect=AssertionError("one by one")):
        found = total(codec, messages(codec, GPU), GPU)
    assert same(found.cpu(), expected)


@pytest.mark.parametrize("spec", (*SPECS, *BOOKS))
def test_the_sender_of_a_damaged_message_is_named(spec: str) -> None:
    codec = parse(spec)
    for number in (0, 2, 3):
        given = messages(codec, GPU)
        bad = given[number].wire.clone()
        bad[:4] = 255  # a scale or a mean that is NaN
        for wire in (bad, bad[:-1]):
            if wire is bad and spec.startswith("natural"):
                continue  # each byte is valid
            given[number] = SentMessage(codec, wire, RANGES[number])
            with pytest.raises(WireError, match=f"rank {SENDERS[number]}"), deferred():
                total(codec, given, GPU)


@pytest.mark.parametrize("values", (*BOOKS, "minmax(bits=4)"))
def test_the_sender_of_damaged_sparse_values_is_named(values: str) -> None:
    """Three messages of the same tensors, whose values are decoded together."""
    codec = parse(f"sparse(topk(density=0.5), values={values}, indices=fine_delta())")
    segments, x = Segments((0, 300), (200, 70)), given("normal", 370)
    wire = codec.encode_segments(x, segments, (0, 1))
    expected = codec.decode_segments_add_(wire, segments, torch.ones(370))
    for number in (None, 0, 2):
        wires = [wire.to(GPU) for _ in range(3)]
        if number is not None:
            values_at = len(wire) - parse(values).message_nbytes(Segments.consecutive([100, 35]))
            wires[number][values_at : values_at + 4] = 255
        sent = zip(SENDERS, (SentMessage(codec, each, segments) for each in wires), strict=False)
        out = torch.ones(370, device=GPU)
        if number is None:
            with deferred():
                add_messages_(out, sent, 1 / 3)
            assert torch.allclose(out.cpu(), expected)
            continue
        with pytest.raises(WireError, match=f"rank {SENDERS[number]}"), deferred():
            add_messages_(out, sent, 1 / 3)
