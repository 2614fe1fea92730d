"""Sparse messages of several ranks, decoded together: the same bits as one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.unit.shared import for_each, same
from torch import Tensor

from laconic import kernels
from laconic.comm.messages import SentEntries, SentMessage, add_messages_
from laconic.core.codec import Codec
from laconic.core.deferred import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Entry, Layout, Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.kernels import checks

GOLOMB = ", indices=golomb()"
CODINGS = (GOLOMB, "", ", indices=delta()", ", indices=fine_delta()", f", values=cast('fp16'){GOLOMB}")
SPECS = [f"sparse(topk(density=0.1){coding})" for coding in CODINGS] + [
    f"sparse(threshold(value=2.5){GOLOMB})"
]
SEGMENTS = Segments((7, 1300, 1301, 1340, 2000), (1200, 1, 0, 600, 65))
START = torch.linspace(-1, 1, 2100)


@pytest.fixture
def reference() -> Iterator[None]:
    with kernels.using("reference"):
        yield


@pytest.fixture
def on_device(reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors take the way of a GPU: flags are deferred, and what they forbid is masked."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(checks, "per_segment", lambda *args: None)


def messages(codec: Codec, size: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2100, generator=rng) ** rank for rank in range(1, size + 1)]
    inputs[-1].zero_()  # a rank that may send nothing
    return [codec.encode_segments(x, SEGMENTS, range(len(SEGMENTS))) for x in inputs]


def one_by_one(codec: Codec, wires: list[Tensor], alpha: float) -> Tensor:
    out = START.clone()
    for wire in wires:
        codec.decode_segments_add_(wire, SEGMENTS, out, alpha)
    return out


def together(codec: Codec, wires: list[Tensor], alpha: float) -> Tensor:
    out = START.clone()
    codec.decode_messages_add_([(wire, SEGMENTS) for wire in wires], out, alpha)
    return out


@for_each("size", [1, 2, 8])
@for_each("spec", SPECS)
def test_together_as_one_by_one(spec: str, size: int) -> None:
    codec = parse(spec)
    wires = messages(codec, size)
    expected = one_by_one(codec, wires, 1 / 3)
    with kernels.using("reference"):
        assert same(messages(codec, size), wires)
        assert torch.equal(one_by_one(codec, wires, 1 / 3), expected)
        assert torch.equal(together(codec, wires, 1 / 3), expected)


@for_each("live", ["reference", kernels.runnable()[-1]])
@for_each("spec", [*SPECS, "sparse(randomk(density=0.1), values=signmean())"])
def test_a_rank_knows_its_entries_as_the_others_decode_them(spec: str, live: str) -> None:
    names = enumerate(SEGMENTS)
    layout = Layout(tuple(Entry(f"w{i}", (size,), start) for i, (start, size) in names))
    with kernels.using(live):
        wire, carried = parse(spec).encode_carried(START, layout, Turn(3))
        message, entries = SentMessage(parse(spec), wire, SEGMENTS), SentEntries(SEGMENTS, *carried)
        for change in ("clear_", "subtract_from_"):
            assert torch.equal(*(getattr(share, change)(START.clone()) for share in (message, entries)))


def test_a_schedule_ends_with_one_codec() -> None:
    select = "density_schedule(topk(density=0.1), densities=(0.5, 0.25), every=10)"
    codec = parse(f"sparse({select}, indices=golomb())")
    densities = [codec.at(step).select.density for step in (0, 9, 10, 19, 20, 99)]
    assert densities == [0.5, 0.5, 0.25, 0.25, 0.1, 0.1]
    assert codec.at(20) is codec.at(99)


@pytest.mark.usefixtures("on_device")
@for_each("spec", [spec for spec in SPECS if "fine_delta" not in spec])
def test_the_way_of_a_gpu_gives_the_same_bits(spec: str) -> None:
    codec = parse(spec)
    wires = messages(codec, 3)
    with deferred():
        out = together(codec, wires, 1 / 3)
    assert torch.equal(out, one_by_one(codec, wires, 1 / 3))


def damage(wire: Tensor, trial: int) -> Tensor:
    """Flip one bit of the positions, or cut or lengthen the message."""
    rng = torch.Generator().manual_seed(trial)
    bad, bit = wire.clone(), 1 << int(torch.randint(0, 8, (1,), generator=rng))
    if trial % 10 == 0:
        return bad[:-1] if trial % 20 else torch.cat([bad, bad[:1]])
    start = 4 * len(SEGMENTS) + 4
    length = int(wire[start - 4 : start].clone().view(torch.int32))
    at = int(torch.randint(start, start + length, (1,), generator=rng))
    bad[at] = int(bad[at]) ^ bit
    return bad


def refused(codec: Codec, wires: list[Tensor], out: Tensor) -> int | None:
    try:
        with deferred():
            codec.decode_messages_add_([(wire, SEGMENTS) for wire in wires], out)
    except WireError as error:
        return error.message
    return None


@pytest.mark.usefixtures("on_device")
@for_each("spec", SPECS[:2])
def test_a_damaged_message_is_named_and_changes_nothing(spec: str) -> None:
    codec = parse(spec)
    wires, found = messages(codec, 3), 0
    for trial in range(60):
        out = START.clone()
        number = refused(codec, [wires[0], damage(wires[1], trial), wires[2]], out)
        assert number in (None, 1)
        assert torch.equal(out, START) is (number == 1)
        found += number == 1
    assert found > 10


@pytest.mark.usefixtures("reference")
def test_a_value_that_is_not_finite_is_refused() -> None:
    codec = parse(SPECS[0])
    for value in (torch.nan, torch.inf):
        wires, out = messages(codec, 3), START.clone()
        wires[1][-4:] = torch.tensor([value]).view(torch.uint8)
        assert refused(codec, wires, out) == 1
        assert torch.equal(out, START)


@for_each("live", ["reference", kernels.runnable()[-1]])
def test_a_single_damaged_message_names_its_rank(live: str) -> None:
    codec, segments = parse("sparse(topk(density=0.1), indices=golomb())"), Segments.whole(100)
    wire = codec.encode(torch.randn(100, generator=torch.Generator().manual_seed(3)))
    share = SentMessage(codec, wire[:-1].clone(), segments)
    with kernels.using(live), pytest.raises(WireError, match="rank 5"):
        add_messages_(torch.zeros(100), [(5, share)], 1.0)
