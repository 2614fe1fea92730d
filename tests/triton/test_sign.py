"""Signs in Triton: the bytes of the reference, damaged wires, and what ptxas makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic.core.deferred import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.sign import gpu, reference

from .offline import TARGETS, Kernel, check

BUFFERS = (
    Segments.whole(1),
    Segments.whole(4096),
    Segments.whole(3 * 4096 + 13),
    Segments.consecutive([1, 7, 0, 40, 511, 513, 4095, 4097, 64]),
    Segments.consecutive([8192, 4096, 64, 4100]),
    Segments((9001, 301, 0), (77, 8300, 299)),
)
BLOCKS = (0, 64, 1024, 4096)
INPUTS = ("heavy", "zeros", "constant", "denormal", "huge", "ties")


def given(kind: str, n: int) -> Tensor:
    rng = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=rng) ** 3
    if kind == "zeros":
        x[torch.arange(n) % 3 == 0] = 0.0
        x[torch.arange(n) % 7 == 0] = -0.0
    elif kind == "constant":
        x.fill_(-0.3)
    elif kind == "denormal":
        x.mul_(2.0**-140)
    elif kind == "huge":
        x = x.sign() * torch.finfo(torch.float32).max
    elif kind == "ties":
        x = (x * 4).round() / 4
    return x


def close(ours: Tensor, theirs: Tensor, segments: Segments, block: int) -> None:
    """Equal signs, and means within 1 ulp."""
    heads = [4 * count for count in reference.blocks_of(segments.sizes, block).counts]
    bits = [(n + 7) // 8 for n in segments.sizes]
    (a, b), (c, d) = (reference.apart(wire, heads, bits) for wire in (ours, theirs))
    assert torch.equal(b, d)
    assert int((a.view(torch.int32) - c.view(torch.int32)).abs().max()) <= 1


@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", INPUTS)
def test_encoding_and_adding_equal_the_reference(kind: str, block: int, segments: Segments) -> None:
    x, keys = given(kind, segments.end + 5), [2**64 - 1 - 2**33 * s for s in range(len(segments))]
    for drawn in (None, keys):
        expected, _ = reference.sign_encode(x, segments, block, drawn)
        wire, flag = gpu.encode(x, segments, block, drawn)
        assert int(flag) == 0
        close(wire, expected, segments, block)
    out = torch.linspace(-1, 1, len(x)) if kind != "huge" else torch.zeros(len(x))
    theirs = out.clone()
    other, _ = reference.sign_encode(-x.roll(1), segments, block, keys)
    for message in (wire, other, wire):
        reference.sign_add_(message, segments, theirs, -1 / 3, block)
    gpu.add_([wire, other, wire], segments, out, -1 / 3, block)
    assert torch.equal(out, theirs)


@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
def test_signs_apart_equal_the_reference(segments: Segments) -> None:
    x, s = given("zeros", segments.end + 5), len(segments)
    wire, _ = gpu.encode(x, segments, 0, None, apart=True)
    bits, means = reference.signs(x, segments)
    assert torch.equal(wire[4 * s :], bits)
    assert int((wire[: 4 * s].view(torch.int32) - means.view(torch.int32)).abs().max()) <= 1
    values, out = torch.linspace(-1, 1, s), torch.ones(len(x))
    theirs = reference.signed_add_(bits, values, segments, out.clone(), 0.5)
    gpu.add_([torch.cat([values.view(torch.uint8), bits])], segments, out, 0.5, 0, apart=True)
    assert torch.equal(out, theirs)


def test_opposite_coins_are_the_complement() -> None:
    x, segments = torch.zeros(5000), Segments.consecutive([4500, 496])
    one, other = (gpu.encode(x, segments, 0, [1, 2], apart=True, opposite=each)[0] for each in (0, 255))
    assert bool((one[8:-1] ^ other[8:-1] == 255)[: 4496 // 8].all())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
def test_what_is_not_finite_sets_the_flag(bad: float, at: int, block: int) -> None:
    x = torch.ones(10_001)
    x[at] = bad
    assert int(gpu.encode(x, Segments.consecutive([1, 10_000]), block, None)[1]) == 1


@pytest.mark.parametrize("block", BLOCKS)
def test_a_damaged_message_is_named_and_nothing_is_written(block: int) -> None:
    segments = Segments.consecutive([4096 + 10, 13])
    wire, _ = gpu.encode(torch.ones(segments.end), segments, block, None)
    padded = wire.clone()
    padded[-1] |= 128
    cases = [(BAD, "must be zero") for BAD in (padded,)]
    for value in (-1.0, -0.0, math.inf, math.nan):
        mean = torch.tensor([value]).view(torch.uint8)
        cases.append((torch.cat([mean, wire[4:]]), "negative or not finite"))
        cases.append((torch.cat([wire[:-6], mean, wire[-2:]]), "negative or not finite"))
    for damaged, says in cases:
        out = torch.zeros(segments.end)
        with pytest.raises(WireError, match=says) as caught, deferred():
            gpu.add_([wire, damaged, wire], segments, out, 1.0, block)
        assert caught.value.message == 1 and not out.any()


ENCODE = {
    "x_ptr": "*fp32", "wire_ptr": "*u8", "flag_ptr": "*i32", "partial_ptr": "*fp64", "keys_ptr": "*i64",
    "table_ptr": "*i64", "tiles": "i32", "opposite": "i32",
}  # fmt: skip
ADD = {
    "out_ptr": "*fp32", "wires_ptr": "*i64", "flags_ptr": "*i32", "table_ptr": "*i64", "tiles": "i32",
    "messages": "i32", "alpha": "fp32",
}  # fmt: skip
VALIDATE = {"wires_ptr": "*i64", "flags_ptr": "*i32", "table_ptr": "*i64", "tiles": "i32", "messages": "i32"}
POINTERS = (
    "x_ptr",
    "out_ptr",
    "wire_ptr",
    "flag_ptr",
    "partial_ptr",
    "keys_ptr",
    "table_ptr",
    "wires_ptr",
    "flags_ptr",
)


def _kernel(name, fn, signature, **constexprs) -> Kernel:  # type: ignore[no-untyped-def]
    aligned = tuple(each for each in POINTERS if each in signature)
    elements = 4096
    wide = bool(constexprs.get("ALIGNED")) and not constexprs.get("MASKED")
    return Kernel(name, fn, signature, constexprs, aligned, elements, wide=wide)


KERNELS = [
    *(
        _kernel(f"sign encode {block} {toss} {aligned} {masked}", gpu.encode_kernel, ENCODE,
                BLOCK=block, TOSS=toss, ALIGNED=aligned, MASKED=masked)
        for block in (0, 1024)
        for toss, aligned, masked in ((True, True, False), (True, False, False), (True, True, True))
    ),
    *(
        _kernel(f"sign add {block} {aligned} {masked}", gpu.add_kernel, ADD,
                BLOCK=block, ALIGNED=aligned, MASKED=masked)
        for block in (0, 1024) for aligned, masked in ((True, False), (False, False), (True, True))
    ),
    _kernel("sign validate", gpu.validate_kernel, VALIDATE, BLOCK=1024, MEANS=True, TILES=64),
]  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
