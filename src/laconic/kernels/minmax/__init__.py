"""Min-max quantisation: evenly spaced values between the extremes of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.deferred import numbering
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.minmax import reference
from laconic.kernels.minmax.form import LONGEST as LONGEST
from laconic.kernels.minmax.form import WIDEST as WIDEST
from laconic.kernels.minmax.form import MinMaxForm as MinMaxForm
from laconic.kernels.minmax.form import minmax_nbytes as minmax_nbytes
from laconic.kernels.minmax.form import sizes_of
from laconic.kernels.minmax.reference import FARTHEST as FARTHEST


def minmax_encode(x: Tensor, segments: Segments, keys: Sequence[int], form: MinMaxForm) -> Tensor:
    """Encode these ranges of x float32 (n,) to one message uint8 (m,).

    Wire per tensor: [unit, minimum] float32 per block of `block` elements, then the levels, low bits first,
    padded to a byte. unit = (max - min) / (2^width - 1); y = (x - min) / unit is rounded to nearest (halves
    up) or, if stochastic, without bias by `dither24` of the tensor's key. Extremes are clipped at 2^126.
    Raises `NonFiniteError` for NaN and Inf; finite inputs decode to finite values.

    >>> minmax_encode(torch.tensor([-1.0, 0.0, 2.0]), Segments.whole(3), [0], MinMaxForm((2,))).tolist()
    [0, 0, 128, 63, 0, 0, 128, 191, 52]
    """
    sizes = sizes_of((segments,), (form,))
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is None:
        if sizes.on_gpu and dispatch.gpu(x):
            from laconic.kernels.minmax import gpu

            packed = checks.keys64(keys, len(segments)) if form.stochastic else None
            return gpu.encode(x, segments, packed, form)
        checks.keys64(keys, len(segments))
        return reference.encode(x, segments, keys, form)
    packed = checks.keys64(keys, len(segments))
    wire = torch.empty(sizes.nbytes[0], dtype=torch.uint8, device="cpu")
    bad = native.minmax_encode(x, segments, packed, form, wire)
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return wire


def minmax_add_(
    wire: Tensor, segments: Segments, out: Tensor, form: MinMaxForm, alpha: float = 1.0
) -> Tensor:
    """Add alpha * (minimum + level * unit) to each segment of `out`, in place.

    Raises `WireError`, before any write, for a wrong length, a negative unit, a non-finite unit, minimum or
    maximum, and nonzero padding.
    """
    _check_message(wire, segments, out, form)
    if (native := dispatch.native(wire, out)) is None:
        if sizes_of((segments,), (form,)).on_gpu and dispatch.gpu(wire, out):
            from laconic.kernels.minmax import gpu

            return gpu.add_messages_([wire], (segments,), out, (form,), alpha, numbered=False)
        return reference.add_(wire, segments, out, form, alpha)
    native.minmax_add_(wire, segments, out, form, alpha)
    return out


def minmax_add_messages_(
    messages: Sequence[tuple[Tensor, Segments]],
    out: Tensor,
    forms: Sequence[MinMaxForm],
    alpha: float = 1.0,
) -> Tensor:
    """Add several messages as `minmax_add_`, in order; one launch on a GPU.

    Forms, one per message, share the block. Messages without elements are not read. Raises `WireError` with
    the damaged message's number; on the CPU, earlier messages may have been added.
    """
    ranges, kinds = tuple([segments for _, segments in messages]), tuple(forms)
    sizes = sizes_of(ranges, kinds)
    wires = [wire[:0] if idle else wire for (wire, _), idle in zip(messages, sizes.idle, strict=True)]
    checks.flat("out", out)
    if sizes.end > out.numel():
        raise ValueError(f"out has {out.numel()} elements, but the segments of messages end at {sizes.end}")
    for number, (wire, expected) in enumerate(zip(wires, sizes.nbytes, strict=True)):
        checks.flat("wire", wire, torch.uint8)
        if wire.numel() != expected:
            with numbering(number):
                raise wrong_length(wire, expected)
    if (native := dispatch.native(out, *wires)) is None:
        if sizes.on_gpu and dispatch.gpu(out, *wires):
            from laconic.kernels.minmax import gpu

            return gpu.add_messages_(wires, ranges, out, kinds, alpha)
        return reference.add_messages_([*zip(wires, ranges, strict=True)], out, kinds, alpha)
    for number, (wire, segments, form) in enumerate(zip(wires, ranges, kinds, strict=True)):
        with numbering(number):
            native.minmax_add_(wire, segments, out, form, alpha)
    return out


def _check_message(wire: Tensor, segments: Segments, out: Tensor, form: MinMaxForm) -> None:
    expected = form.message_nbytes(segments)
    checks.flat("wire", wire, torch.uint8)
    checks.buffer("out", out, segments)
    if wire.numel() != expected:
        raise wrong_length(wire, expected)


def wrong_length(wire: Tensor, expected: int) -> WireError:
    return WireError(f"a message of {expected} bytes is expected, got {wire.numel()}")
