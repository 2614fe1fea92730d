"""Natural compression in Triton: the bytes of the reference, forced ties, damaged wires, and ptxas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic.core.deferred import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.natural import gpu, reference
from laconic.kernels.philox.reference import dithers24

from .offline import TARGETS, Kernel, check
from .test_sign import BUFFERS

INPUTS = ("heavy", "ties", "constant", "wide", "zeros")


def given(kind: str, n: int) -> Tensor:
    rng = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=rng) ** 3
    if kind == "zeros":
        x[torch.arange(n) % 3 == 0] = -0.0
    elif kind == "constant":
        x.fill_(-0.3)
    elif kind == "wide":
        x = (x.double() * 2.0 ** torch.randint(-150, 120, (n,), generator=rng).double()).float()
    return x


def tied(x: Tensor, segments: Segments, keys: list[int]) -> Tensor:
    """x with mantissas that only the lower 8 bits of the dither decide about, by one either way."""
    dither = dithers24(keys, segments.sizes)
    at = 0
    for view in segments.views(x):
        n = view.numel()
        each = (dither[at : at + n] + torch.arange(n, dtype=torch.int32) % 3 * 2 - 2).clamp(
            0, (1 << 24) - 1
        ) >> 1
        view.copy_((127 << 23 | each).view(torch.float32))
        at += n
    return x


@pytest.mark.parametrize("segments", BUFFERS, ids=lambda s: f"{s.numel}in{len(s)}")
@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("kind", INPUTS)
def test_encoding_and_adding_equal_the_reference(kind: str, bits: int, segments: Segments) -> None:
    keys = [2**64 - 1 - 2**33 * s for s in range(len(segments))]
    x = given(kind, segments.end + 5)
    if kind == "ties":
        x = tied(x, segments, keys)
    wire, flag = gpu.encode(x, segments, keys, bits)
    expected, _ = reference.natural_encode(x, segments, keys, bits)
    assert int(flag) == 0 and torch.equal(wire, expected)
    other, _ = reference.natural_encode(-x.roll(1), segments, keys, bits)
    out = torch.linspace(-1, 1, len(x))
    theirs = out.clone()
    for message in (wire, other, wire):
        reference.natural_add_(message, segments, theirs, -1 / 3, bits)
    gpu.add_([wire, other, wire], segments, out, -1 / 3, bits)
    assert torch.equal(out, theirs)


@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
def test_what_is_not_finite_sets_the_flag(bad: float, at: int, bits: int) -> None:
    x = torch.full((10_001,), torch.finfo(torch.float32).max)
    assert int(gpu.encode(x, Segments.consecutive([1, 10_000]), [1, 2], bits)[1]) == 0
    x[at] = bad
    assert int(gpu.encode(x, Segments.consecutive([1, 10_000]), [1, 2], bits)[1]) == 1


def test_a_damaged_message_is_named_and_nothing_is_written() -> None:
    segments = Segments.consecutive([4096 + 10, 13])
    wire, _ = gpu.encode(torch.ones(segments.end), segments, [1, 2], 9)
    infinite, padded = wire.clone(), wire.clone()
    infinite[-1], padded[-14] = 255, 128
    for damaged, says in ((infinite, "at most 254"), (padded, "must be zero")):
        out = torch.zeros(segments.end)
        with pytest.raises(WireError, match=says) as caught, deferred():
            gpu.add_([wire, damaged, wire], segments, out, 1.0, 9)
        assert caught.value.message == 1 and not out.any()


ENCODE = {
    "x_ptr": "*fp32", "wire_ptr": "*u8", "flag_ptr": "*i32", "keys_ptr": "*i64", "table_ptr": "*i64",
    "tiles": "i32",
}  # fmt: skip
ADD = {
    "out_ptr": "*fp32", "wires_ptr": "*i64", "flags_ptr": "*i32", "table_ptr": "*i64", "tiles": "i32",
    "messages": "i32", "alpha": "fp32",
}  # fmt: skip
VALIDATE = {"wires_ptr": "*i64", "flags_ptr": "*i32", "table_ptr": "*i64", "tiles": "i32", "messages": "i32"}


def _kernel(name, fn, signature, **constexprs) -> Kernel:  # type: ignore[no-untyped-def]
    aligned = tuple(each for each, kind in signature.items() if kind.startswith("*"))
    wide = bool(constexprs.get("ALIGNED")) and not constexprs.get("MASKED")
    return Kernel(name, fn, signature, constexprs, aligned, wide=wide)


KERNELS = [
    *(
        _kernel(
            f"natural {name} {bits} {aligned} {masked}",
            fn,
            signature,
            BITS=bits,
            ALIGNED=aligned,
            MASKED=masked,
        )
        for name, fn, signature in (("encode", gpu.encode_kernel, ENCODE), ("add", gpu.add_kernel, ADD))
        for bits in (8, 9)
        for aligned, masked in ((True, False), (False, False), (True, True))
    ),
    _kernel("natural validate", gpu.validate_kernel, VALIDATE),
]


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_fit(kernel: Kernel, target: str) -> None:
    check(kernel, target)
