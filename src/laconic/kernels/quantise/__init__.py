"""Quantisers: each element becomes a level of its block's scale, at random."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.quantise import reference
from laconic.kernels.quantise.form import Form as Form
from laconic.kernels.quantise.form import Measure as Measure

LARGEST = Measure()


def norms(x: Tensor, segments: Segments, measure: Measure = LARGEST, block: int = 0) -> Tensor:
    """Return one float32 per block of these ranges of x float32 (n,): (B,).

    Blocks have `block` elements (0: the whole tensor), a tensor's last perhaps fewer. The norm is 'max' |x|,
    which `clip` limits to that many standard deviations (at least the root mean square); 'l2'; or 'mean' |x|.
    Not finite where an element is not.

    >>> norms(torch.tensor([3.0, -4.0, 2.0]), Segments.whole(3), block=2).tolist()
    [4.0, 2.0]
    """
    form = Form(1, block)
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        out = torch.empty(form.blocks(segments), dtype=torch.float32, device="cpu")
        native.norms(x, segments, measure, block, out)
        return out
    if dispatch.gpu(x):
        from laconic.kernels.quantise import gpu

        return gpu.norms(x, segments, form, measure)
    return reference.norms(x, segments, form, measure)


def quantise(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure = LARGEST
) -> Tensor:
    """Encode these ranges of x float32 (n,) to one message uint8 (m,).

    Wire per tensor: scales float32 (ceil(n / block),), then codes, padded to a byte. A code is [sign 1 |
    level] of 1 + bit_length(levels) bits; `packing='base3'` (levels=1) packs five per byte. Of s levels,
    level l means l / s of the scale (`grid='uniform'`) or, from 1 on, 2^(l - s) ('powers'). |x| is rounded to
    a neighbouring level without bias, by `dither24` of the tensor's key. Scales are `norms` or given, float32
    (B,), and clip |x|; entries below a given floor float32 (B,) become 0.

    Raises `NonFiniteError` for NaN and Inf; finite inputs decode to finite values.

    >>> x, form = torch.tensor([1.0, -0.5, 0.0, 0.25]), Form(levels=4)
    >>> wire = quantise(x, Segments.whole(4), [7], form)
    >>> dequantise_add_(wire, Segments.whole(4), torch.zeros(4), form).tolist()
    [1.0, -0.5, 0.0, 0.25]
    """
    _check(x, segments, form, measure)
    if dispatch.gpu(x):
        from laconic.kernels.quantise import gpu

        return gpu.quantise(x, segments, keys, form, measure)
    if (native := dispatch.native(x)) is None:
        return reference.quantise(x, segments, keys, form, measure)
    wire = torch.empty(form.message_nbytes(segments), dtype=torch.uint8, device="cpu")
    bad = native.quantise(x, segments, checks.keys64(keys, len(segments)), form, measure, wire)
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return wire


def quantise_levels(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure = LARGEST
) -> tuple[Tensor, Tensor]:
    """Return the unpacked `quantise`: scales float32 (B,) and signed levels int32 (K,)."""
    _check(x, segments, form, measure)
    if dispatch.gpu(x):
        from laconic.kernels.quantise import gpu

        return gpu.quantise_levels(x, segments, keys, form, measure)
    if (native := dispatch.native(x)) is None:
        return reference.quantise_levels(x, segments, keys, form, measure)
    scales = torch.empty(form.blocks(segments), dtype=torch.float32, device="cpu")
    signed = torch.empty(segments.numel, dtype=torch.int32, device="cpu")
    bad = native.quantise_levels(
        x, segments, checks.keys64(keys, len(segments)), form, measure, scales, signed
    )
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return scales, signed


def dequantise_add_(wire: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float = 1.0) -> Tensor:
    """Add alpha * the values of a `quantise` message to each segment of `out`, in place.

    Raises `WireError`, before any write, for a wrong length, a negative or non-finite scale, an impossible
    level and nonzero padding.
    """
    return dequantise_messages_add_([wire], segments, out, form, alpha)


def dequantise_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, form: Form, alpha: float = 1.0
) -> Tensor:
    """Add several messages as `dequantise_add_`, in order.

    A `WireError` has the damaged message's number; others may have been added.
    """
    checks.buffer("out", out, segments)
    for wire in wires:
        checks.flat("wire", wire, torch.uint8)
    if dispatch.gpu(out, *wires):
        from laconic.kernels.quantise import gpu

        if gpu.dequantises(form):
            return gpu.dequantise_messages_add_(wires, segments, out, form, alpha)
    for number, wire in enumerate(wires):
        with deferred.translated(partial(_of_message, number)):
            if (native := dispatch.native(wire, out)) is None:
                reference.dequantise_add_(wire, segments, out, form, alpha)
            else:
                native.dequantise_add_(wire, segments, out, form, alpha)
    return out


def _of_message(number: int, error: Exception) -> Exception:
    if isinstance(error, WireError):
        error.message = number
    return error


def levels_add_(
    signed: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float = 1.0
) -> Tensor:
    """Add alpha * the values of signed levels int32 (K,) with scales float32 (B,), in place.

    On the uniform grid |level| may exceed `levels`, as sums do; 'powers' raises `WireError`.
    """
    checks.flat("signed", signed, torch.int32)
    checks.flat("scales", scales)
    checks.buffer("out", out, segments)
    if signed.numel() != segments.numel or scales.numel() != form.blocks(segments):
        raise WireError(
            f"{segments.numel} elements in {form.blocks(segments)} blocks have as many levels and scales, "
            f"got {signed.numel()} and {scales.numel()}"
        )
    most = form.levels
    if form.powers and signed.numel():
        least, largest = torch.aminmax(signed)
        beyond = (torch.maximum(-least, largest) > most).to(torch.int32).view(1)
        deferred.check(beyond, lambda _: WireError(f"levels must be in -{most}..{most}, got a larger one"))
        signed = signed if signed.is_cpu else signed.clamp(-most, most)
    if dispatch.gpu(signed, scales, out):
        from laconic.kernels.quantise import gpu

        return gpu.levels_add_(signed, scales, segments, out, form, alpha)
    if (native := dispatch.native(signed, scales, out)) is None:
        return reference.levels_add_(signed, scales, segments, out, form, alpha)
    native.levels_add_(signed, scales, segments, out, form, alpha)
    return out


def _check(x: Tensor, segments: Segments, form: Form, measure: Measure) -> None:
    checks.buffer("x", x, segments)
    if measure.scales is not None or measure.floors is not None:
        measure.check(form.blocks(segments))
