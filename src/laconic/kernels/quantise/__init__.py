"""Quantisers: each element as one of few levels between 0 and the scale of its block, rounded at random."""

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

LARGEST = Measure()  # the scale of a block is its largest |x|


def norms(x: Tensor, segments: Segments, measure: Measure = LARGEST, block: int = 0) -> Tensor:
    """Return one float32 for each block of these ranges of x float32 (n,), tensor after tensor: (B,).

    A tensor is cut in runs of `block` elements, the last one shorter; 0 leaves it whole, and an empty one
    has none. The measure's norm: 'max' |x|, and that at most `clip` standard deviations, but no less than the
    root mean square; 'l2'; or 'mean' |x|. Not finite where an element of the block is not.

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
    """Encode these ranges of x float32 (n,) to one message uint8 (m,); x is read once if blocks fit in cache.

    For each tensor: scales float32 (ceil(n / block),), then the codes, padded to a byte. A code is
    [sign 1 | level], of 1 + bit_length(levels) bits, or five ternary ones are a byte (`packing='base3'`,
    levels=1). Level l of s means l / s of the scale (`grid='uniform'`) or, from 1 on, 2^(l - s) ('powers').
    |x| becomes one of the two levels around it, so that the mean is |x|, by `dither24` of the tensor's key.
    Scales are the `norms`, or those given, float32 (B,), and |x| is clipped there; entries smaller than a
    given floor of their block, float32 (B,), become 0.

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
    """Return the unpacked content of `quantise`: scales float32 (B,), and signed levels int32 (K,)."""
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
    """out[segment] += alpha * the values of a message that `quantise` made in the same form, in place.

    Raises `WireError`, before anything is written, for a wrong length, a scale that is negative or not
    finite, a level that there is not, and padding that is not zero.
    """
    return dequantise_messages_add_([wire], segments, out, form, alpha)


def dequantise_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, form: Form, alpha: float = 1.0
) -> Tensor:
    """`dequantise_add_` of several messages of these ranges, in their order.

    A `WireError` has the number of the damaged message as its `message`; others may have been added.
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
    """out[segment] += alpha * the values of signed levels int32 (K,) with scales float32 (B,), in place.

    On the uniform grid |level| may exceed `levels`: sums of levels are levels. On 'powers', `WireError`.
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
        deferred.check(beyond, lambda _: WireError(f"there are levels up to {most}, got a larger one"))
        signed = signed if signed.is_cpu else signed.clamp(-most, most)
    if dispatch.gpu(signed, scales, out):
        from laconic.kernels.quantise import gpu

        return gpu.levels_add_(signed, scales, segments, out, form, alpha)
    if (native := dispatch.native(signed, scales, out)) is None:
        return reference.levels_add_(signed, scales, segments, out, form, alpha)
    native.levels_add_(signed, scales, segments, out, form, alpha)
    return out


def _check(x: Tensor, segments: Segments, form: Form, measure: Measure) -> None:
    """Raises `ValueError` for arguments that do not fit together."""
    checks.buffer("x", x, segments)
    if measure.scales is not None or measure.floors is not None:
        measure.check(form.blocks(segments))
