"""Min-max in Triton: the bytes and sums of the reference, in the interpreter; its fit on GPUs, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import MinMaxForm, checks
from laconic.kernels.minmax import gpu, reference
from tests.triton.offline import TARGETS, Kernel, check

ENCODE = {"x_ptr": "*fp32", "wire_ptr": "*u8", "keys_ptr": "*i64", "flags_ptr": "*i32", "table_ptr": "*i64"}
ADD = {
    "wire_ptr": "*u8",
    "base": "i32",
    "stride": "i32",
    "flags_ptr": "*i32",
    "any_flag": "i32",
    "out_ptr": "*fp32",
    "table_ptr": "*i64",
    "alpha": "fp32",
}
VALIDATE = {
    "wire_ptr": "*u8",
    "stride": "i32",
    "flags_ptr": "*i32",
    "table_ptr": "*i64",
    "any_flag": "i32",
}


def _encode(name: str, width: int = 4, block: int = 512, random: bool = False, whole: bool = True) -> Kernel:
    return Kernel(
        f"minmax_encode {name}",
        gpu.encode_kernel,
        ENCODE,
        {
            "WIDTH": width,
            "BLOCK": block,
            "STOCHASTIC": random,
            "MASKED": not whole,
            "ALIGNED": True,
            "WORDS": whole,
        },
        aligned=("x_ptr", "wire_ptr", "keys_ptr", "flags_ptr", "table_ptr"),
        wide=whole,
    )


def _add(name: str, count: int, width: int = 4, block: int = 512, whole: bool = True) -> Kernel:
    return Kernel(
        f"minmax_add {name}",
        gpu.add_kernel,
        ADD,
        {
            "COUNT": count,
            "WIDTH": width,
            "BLOCK": block,
            "MASKED": not whole,
            "ALIGNED": True,
            "WORDS": whole,
        },
        aligned=("flags_ptr", "out_ptr", "table_ptr"),
        wide=whole,
    )


KERNELS = (
    _encode("4 bits"),
    _encode("4 bits at random", random=True),
    _encode("8 bits in blocks of 64", width=8, block=64),
    _encode("2 bits in blocks of 2048", width=2, block=2048),
    _encode("4 bits, rest", whole=False),
    _encode("4 bits at random, rest", random=True, whole=False),
    _add("8 messages", 8),
    _add("one message", 1),
    _add("8 messages of 8 bits in blocks of 64", 8, width=8, block=64),
    _add("8 messages, rest", 8, whole=False),
    Kernel(
        "minmax_validate",
        gpu.validate_kernel,
        VALIDATE,
        {"MOST": 15.0, "CHUNK": gpu.CHUNK, "WORDS": True},
        aligned=("wire_ptr", "flags_ptr", "table_ptr"),
        elements=gpu.CHUNK,
        num_warps=4,
        wide=False,
    ),
)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
BUFFERS = (
    Segments.whole(4096),
    Segments.whole(40),
    Segments((3, 5000, 9501, 12_000), (4097, 0, 1000, 513)),
    Segments((0, 8192), (8192, 512)),
)
FORMS = ((4, 512), (2, 32), (8, 64), (4, 256), (2, 1024), (8, 4096))


def data(n: int) -> Tensor:
    """Heavy-tailed, with zeros, -0.0, a constant, denormals and the largest numbers."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) ** 3
    x[5:40] = 0
    x[40:60] = -0.0
    x[300:900] = 0.1
    x[1500:1700] *= 1e-41
    x[2000:2010] = 3e38
    x[2010:2020] = -3e38
    return x


def encoded(x: Tensor, segments: Segments, keys: Sequence[int], form: MinMaxForm) -> Tensor:
    return gpu.encode(x, segments, checks.keys64(keys, len(segments)), form)


def added_(
    messages: Sequence[tuple[Tensor, Segments]], out: Tensor, forms: Sequence[MinMaxForm], alpha: float
) -> Tensor:
    wires, ranges = zip(*messages, strict=True)
    return gpu.add_messages_(wires, ranges, out, tuple(forms), alpha)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("segments", BUFFERS)
@pytest.mark.parametrize(("width", "block"), FORMS)
def test_bytes_and_sums_are_those_of_the_reference(segments: Segments, width: int, block: int) -> None:
    x = data(13_000)
    keys = [2**64 - 1 - i for i in range(len(segments))]
    for rounding in ("nearest", "stochastic"):
        form = MinMaxForm((width,) * len(segments), block, rounding)
        wire = reference.encode(x, segments, keys, form)
        assert torch.equal(encoded(x, segments, keys, form), wire)
    for count in (1, 3, 10):
        messages, forms = [(wire, segments)] * count, [form] * count
        out = added_(messages, x.clone(), forms, -0.3)
        assert same(out, reference.add_messages_(messages, x.clone(), forms, -0.3))


def test_ties_of_the_upper_bits_are_broken_by_the_lower_ones() -> None:
    """Fractions whose upper 16 bits are those of the dither, and whose lower bits are on either side."""
    n, key = 4096 + 1000, 2**63 + 12_345
    dither = kernels.dither24(key, n)
    x = (dither + torch.arange(n) % 3 - 1).clamp(0, (1 << 24) - 1).to(torch.float32) * 2.0**-24
    x[::512], x[1::512] = 0.0, 3.0  # a unit of 1
    segments, form = Segments((1,), (n,)), MinMaxForm((2,), 512, "stochastic")
    buffer = torch.cat([torch.zeros(1), x])
    wire = reference.encode(buffer, segments, [key], form)
    assert torch.equal(encoded(buffer, segments, [key], form), wire)
    level = kernels.unpack_bits(wire[8 * 10 :], 2, n)
    up = (dither < (x * 2.0**24).to(torch.int32)) & (x < 1)
    assert torch.equal(level, torch.where(x == 3, 3, up.to(torch.int32)))


def test_messages_of_different_segments_in_any_order() -> None:
    x = data(9000)
    apart = [Segments((5000, 0), (3001, 700)), Segments((), ()), Segments((1001,), (3999,))]
    crossing = [Segments((5000,), (3001,)), Segments((4000,), (4100,))]
    for ranges in (apart, crossing):
        forms = [MinMaxForm((4,) * len(segments)) for segments in ranges]
        wires = [
            reference.encode(x, segments, [1] * len(segments), form)
            for segments, form in zip(ranges, forms, strict=True)
        ]
        messages = [
            (torch.cat([wire.new_zeros(1), wire])[1:], each) for wire, each in zip(wires, ranges, strict=True)
        ]
        out = added_(messages, x.clone(), forms, 2.5)
        for segments, wire, form in zip(ranges, wires, forms, strict=True):
            reference.add_(wire, segments, x, form, 2.5)
        assert same(out, x)
        x = data(9000)


@pytest.mark.parametrize(("at", "value"), [(0, 255), (3, 255), (7, 127), (27, 128)])
def test_no_message_is_added_if_one_is_invalid(at: int, value: int) -> None:
    segments, form = Segments.whole(5000), MinMaxForm((4,))
    wire = encoded(data(5000), segments, [1], form)
    bad = wire.clone()
    bad[at] = value if at else 255
    if at == 0:
        bad[:8] = torch.tensor([3e38, 1.0]).view(torch.uint8)
    if at == 27:
        segments, form = Segments.whole(4999), MinMaxForm((4,))
        wire = encoded(data(4999), segments, [1], form)
        bad = wire.clone()
        bad[-1] = bad[-1] | 0xF0
    if at == 7:
        bad[4:8] = torch.tensor([float("inf")]).view(torch.uint8)
    out = torch.ones(5000)
    with pytest.raises(WireError) as caught:
        added_([(wire, segments), (bad, segments)], out, [form] * 2, 1.0)
    assert caught.value.message == 1
    assert bool((out == 1).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 4095, 4096, 4999])
def test_what_is_not_finite_is_refused(bad: float, at: int) -> None:
    x, segments = torch.ones(5001), Segments.consecutive([1, 5000])
    x[1 + at] = bad
    with pytest.raises(NonFiniteError, match=r"tensor 1 of the message \(5000"):
        encoded(x, segments, [1, 2], MinMaxForm((4, 4)))


@pytest.mark.compiled
@pytest.mark.parametrize("target", [name for name in TARGETS if name in ("sm_80", "sm_90")])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
