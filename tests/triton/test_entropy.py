"""Sparse messages in Triton: the bytes and sums of the reference, in the interpreter; their fit on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.sampled_topk import SampledTopK
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn
from laconic.kernels import dispatch
from laconic.kernels.entropy import gpu, triton_decode, triton_encode
from laconic.kernels.select import gpu as select_gpu
from tests.triton.offline import TARGETS, Kernel, check

TABLES = {"sizes": "*i64", "num": "i32", "starts": "*i64", "out": "*fp32", "x": "*fp32", "alpha": "fp32"}
ENCODE = TABLES | {
    "indices": "*i32",
    "counts": "*i64",
    "highs": "*i64",
    "words": "*i32",
    "facts": "*i64",
    "chosen": "*fp32",
    "places": "*i64",
}
DECODE = TABLES | {
    "base": "*u8",
    "where": "*i64",
    "messages": "i32",
    "rooms": "i32",
    "rows": "*i32",
    "facts": "*i64",
    "flags": "*i32",
    "ends": "*i32",
}


def _kernel(fn: object, signature: dict[str, str], num_warps: int = 4, **constants: int) -> Kernel:
    name = fn.__name__  # type: ignore[attr-defined]
    return Kernel(name, fn, signature, constants, num_warps=num_warps, wide=False)


KERNELS = (
    _kernel(triton_encode.measure_kernel, ENCODE, SEGMENTS=gpu.SEGMENTS, ENTRIES=gpu.ENTRIES),
    _kernel(triton_encode.write_kernel, ENCODE, 8, SEGMENTS=gpu.SEGMENTS, ENTRIES=gpu.ENTRIES),
    _kernel(triton_decode.ones_kernel, DECODE, 8, SEGMENTS=gpu.SEGMENTS, BITS=gpu.BITS),
    _kernel(triton_decode.places_kernel, DECODE, ENTRIES=gpu.ENTRIES),
    _kernel(triton_decode.add_kernel, DECODE, MESSAGES=8, ENTRIES=gpu.ENTRIES),
)
BUFFERS = (
    Segments.whole(5000),
    Segments((3, 1000, 1501, 1900), (997, 0, 300, 513)),
    Segments.consecutive((3, 1, 9, 40) * 5),
)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops of the kernels run several times on short tensors."""
    for name, value in (("SEGMENTS", 16), ("ENTRIES", 64), ("BITS", 128)):
        monkeypatch.setattr(gpu, name, value)


def codec(density: float) -> Sparse:
    return Sparse(TopK(density=density), indices=GOLOMB)


def encoded(x: Tensor, segments: Segments, density: float) -> Tensor:
    return codec(density).encode_segments(x, segments, [1] * len(segments))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def shifted(wire: Tensor) -> Tensor:
    return torch.cat([wire.new_zeros(1), wire])[1:]


@pytest.mark.parametrize("segments", BUFFERS)
@pytest.mark.parametrize("density", [0.01, 0.5])
def test_bytes_and_sums_are_those_of_the_reference(segments: Segments, density: float) -> None:
    x = torch.randn(segments.end, generator=torch.Generator().manual_seed(len(segments))) ** 3
    x[::7] = 0
    wire = encoded(x, segments, density)
    indices, counts = codec(density).select.select_segments(x, segments, [1] * len(segments))
    made, chosen, places, facts = gpu.encode(x, segments, indices, counts, 40_000)
    coded, wrong = facts.tolist()
    assert not wrong and 4 * (len(segments) + 1) + coded + 4 * indices.numel() == wire.numel()
    assert torch.equal(made[: wire.numel()], wire)
    assert torch.equal(places, kernels.flat_positions(indices, counts, segments))
    assert same(chosen, x[places])
    wires = [wire, shifted(encoded(x.flip(0).contiguous(), segments, density)), wire]
    wanted, out = x.clone(), x.clone()
    for each in wires:
        codec(density).decode_segments_add_(each, segments, wanted, -0.3)
    assert gpu.add_(wires, segments, out, -0.3).tolist() == [0, 0, 0]
    assert same(out, wanted)


def test_indices_that_do_not_ascend_are_reported() -> None:
    x, segments = torch.ones(500), Segments.consecutive((100, 400))
    for wrong in ([5, 5, 7], [6, 5, 7], [5, 100, 7], [-1, 2, 7]):
        indices = torch.tensor(wrong, dtype=torch.int32)
        facts = gpu.encode(x, segments, indices, torch.tensor([2, 1]), 100)[-1]
        assert facts.tolist()[1] == 1


def test_a_damaged_message_changes_nothing() -> None:
    """The flag is set exactly where the codec refuses a message."""
    segments = Segments.consecutive((100, 3, 90))
    x = torch.randn(193, generator=torch.Generator().manual_seed(0))
    wire = encoded(x, segments, 0.05)
    damaged = [wire[:-1], wire[:-4], shifted(wire)[:16], torch.cat([wire, wire[-4:]])]
    for at in range(wire.numel()):
        other = wire.clone()
        other[at] ^= (1, 0x80, 0x55)[at % 3]
        damaged.append(other)
    refused = 0
    for bad in damaged:
        wanted, out = torch.zeros(193), torch.zeros(193)
        codec(0.05).decode_segments_add_(wire, segments, wanted)
        try:
            codec(0.05).decode_segments_add_(bad, segments, wanted)
            flags = [0, 0]
        except WireError:
            flags, wanted = [0, 1], torch.zeros(193)
            refused += 1
        assert gpu.add_([wire, bad], segments, out, 1.0).tolist() == flags
        assert same(out, wanted)
    assert refused > 20


def test_the_codec_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments.consecutive((100, 3, 90))
    x = torch.randn(193, generator=torch.Generator().manual_seed(1))
    layout = Layout.of([("a", (100,)), ("b", (3,)), ("c", (90,))])
    wanted, carried = codec(0.1).encode_carried(x, layout, Turn(0, 0, 0))
    summed = codec(0.1).decode_segments_add_(wanted, segments, x.clone(), 0.5)
    with kernels.using("reference"):
        monkeypatch.setattr(dispatch, "gpu", lambda *_: True)
        monkeypatch.setattr("laconic.kernels.select.dispatch.gpu", lambda *_: False)
        wire, made = codec(0.1).encode_carried(x, layout, Turn(0, 0, 0))
        assert torch.equal(wire, wanted)
        assert carried is not None and made is not None and same(made.values, carried.values)
        assert same(codec(0.1).decode_messages_add_([(wire, segments)], x.clone(), 0.5), summed)
        bad = wire.clone()
        bad[-1] = 255
        bad[-2] = 255
        out = x.clone()
        for message in (bad, wire[:-1], wire[:7]):
            with pytest.raises(WireError) as error:
                codec(0.1).decode_messages_add_([(wire, segments), (message, segments)], out)
            assert error.value.message == 1
            assert same(out, x)


@pytest.mark.parametrize("room", [0, 1])
def test_the_codec_selects_and_encodes_in_one(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """With room for one entry only, the selection is repeated."""
    sparse = Sparse(SampledTopK(density=0.05), indices=GOLOMB)
    layout = Layout.of([("a", (1500,)), ("b", (3,)), ("c", (90,))])
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    wanted, carried = sparse.encode_carried(x, layout, Turn(0, 0, 0))
    assert carried is not None
    padded = select_gpu.padded
    with kernels.using("reference"):
        monkeypatch.setattr(dispatch, "gpu", lambda *_: True)
        monkeypatch.setattr(select_gpu, "padded", lambda *args: padded(*args[:5], sum(args[5:]) or room))
        wire, made = sparse.encode_carried(x, layout, Turn(0, 0, 0))
    assert torch.equal(wire, wanted)
    assert made is not None and same(made.values, carried.values)
    assert torch.equal(made.indices, carried.indices) and torch.equal(made.counts, carried.counts)
    assert made.positions is not None
    assert torch.equal(made.positions, kernels.flat_positions(made.indices, made.counts, layout.segments))


@pytest.mark.compiled
@pytest.mark.parametrize("target", [name for name in TARGETS if name in ("sm_80", "sm_90")])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
