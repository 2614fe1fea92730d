"""Quantisers: each element as one of few levels between 0 and the scale of its bucket, rounded at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.quantise import reference
from laconic.kernels.quantise.form import Form, Measure


def norms(x: Tensor, segments: Segments, bucket: int = 0, norm: str = "max", clip: float = 0.0) -> Tensor:
    """One float32 for each bucket of these ranges of x float32 (n,), tensor after tensor: (B,).

    A tensor is cut in runs of `bucket` elements, the last one shorter; 0 leaves it whole, and an empty one
    has none. `norm`: 'max' |x|, and that at most `clip` standard deviations, but no less than the root mean
    square; 'l2'; or 'mean' |x|. Not finite where an element of the bucket is not.

    >>> norms(torch.tensor([3.0, -4.0, 2.0]), Segments.whole(3), bucket=2).tolist()
    [4.0, 2.0]
    """
    form, measure = Form(1, bucket), Measure(norm, clip)
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        out = torch.empty(form.buckets(segments), dtype=torch.float32)
        native.norms(x, segments.starts_tensor, segments.sizes_tensor, bucket, measure.number, clip, out)
        return out
    return reference.norms(x, segments, form, measure)


def quantise(
    x: Tensor,
    segments: Segments,
    keys: Sequence[int],
    *,
    levels: int,
    bucket: int = 0,
    grid: str = "uniform",
    packing: str = "bits",
    norm: str = "max",
    clip: float = 0.0,
    scales: Tensor | None = None,
    floors: Tensor | None = None,
) -> Tensor:
    """One message uint8 (m,) of these ranges of x float32 (n,), read once where the buckets fit in the cache.

    For each tensor: scales float32 (ceil(n / bucket),), then the codes, padded to a byte. A code is
    [sign 1 | level], of 1 + bit_length(levels) bits, or five ternary ones are a byte (`packing='base3'`,
    levels=1). Level l of s means l / s of the scale (`grid='uniform'`) or, from 1 on, 2^(l - s) ('powers').
    |x| becomes one of the two levels around it, so that the mean is |x|, by `dither24` of the tensor's key.
    Scales are the `norms`, or those given, float32 (B,), and |x| is cut off there; what is smaller than a
    given floor of its bucket, float32 (B,), becomes 0.

    Raises `NonFiniteError` for NaN and Inf; what is finite decodes to what is finite.

    >>> x = torch.tensor([1.0, -0.5, 0.0, 0.25])
    >>> wire = quantise(x, Segments.whole(4), [7], levels=4)
    >>> dequantise_add_(wire, Segments.whole(4), torch.zeros(4), levels=4).tolist()
    [1.0, -0.5, 0.0, 0.25]
    """
    form = Form(levels, bucket, grid, packing)
    measure = Measure(norm, clip, scales, floors)
    z, least, at = _checked(x, segments, keys, form, measure)
    if (native := dispatch.native(x)) is None:
        return reference.quantise(x, segments, keys, form, measure)
    wire = torch.empty(form.message_nbytes(segments), dtype=torch.uint8)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    powers, base3 = grid == "powers", packing == "base3"
    bad = native.quantise(
        x, starts, sizes, at, levels, bucket, powers, base3, measure.number, clip, z, least, wire
    )
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return wire


def quantise_levels(
    x: Tensor,
    segments: Segments,
    keys: Sequence[int],
    *,
    levels: int,
    bucket: int = 0,
    grid: str = "uniform",
    norm: str = "max",
    clip: float = 0.0,
    scales: Tensor | None = None,
    floors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `quantise` would send, unpacked: scales float32 (B,), and levels with their sign int32 (K,)."""
    form = Form(levels, bucket, grid)
    measure = Measure(norm, clip, scales, floors)
    z, least, at = _checked(x, segments, keys, form, measure)
    if (native := dispatch.native(x)) is None:
        return reference.quantise_levels(x, segments, keys, form, measure)
    made = torch.empty(form.buckets(segments), dtype=torch.float32)
    out = torch.empty(segments.numel, dtype=torch.int32)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    bad = native.quantise_levels(
        x, starts, sizes, at, levels, bucket, grid == "powers", measure.number, clip, z, least, made, out
    )
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return made, out


def dequantise_add_(
    wire: Tensor,
    segments: Segments,
    out: Tensor,
    alpha: float = 1.0,
    *,
    levels: int,
    bucket: int = 0,
    grid: str = "uniform",
    packing: str = "bits",
) -> Tensor:
    """out[segment] += alpha * the values of a message that `quantise` made with the same options, in place.

    Raises `WireError`, before anything is written, for a wrong length, a scale that is negative or not
    finite, a level that there is not, and padding that is not zero.
    """
    form = Form(levels, bucket, grid, packing)
    checks.flat("wire", wire, torch.uint8)
    checks.buffer("out", out, segments)
    if (native := dispatch.native(wire, out)) is None:
        return reference.dequantise_add_(wire, segments, out, alpha, form)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    native.dequantise_add_(
        wire, starts, sizes, out, alpha, levels, bucket, grid == "powers", packing == "base3"
    )
    return out


def levels_add_(
    signed: Tensor,
    scales: Tensor,
    segments: Segments,
    out: Tensor,
    alpha: float = 1.0,
    *,
    levels: int,
    bucket: int = 0,
    grid: str = "uniform",
) -> Tensor:
    """out[segment] += alpha * the values of signed levels int32 (K,) with scales float32 (B,), in place.

    On the uniform grid |level| may exceed `levels`: sums of levels are levels. On 'powers', `WireError`.
    """
    form = Form(levels, bucket, grid)
    checks.flat("signed", signed, torch.int32)
    checks.flat("scales", scales)
    checks.buffer("out", out, segments)
    if signed.numel() != segments.numel or scales.numel() != form.buckets(segments):
        raise WireError(
            f"{segments.numel} elements in {form.buckets(segments)} buckets have as many levels and scales, "
            f"got {signed.numel()} and {scales.numel()}"
        )
    if grid == "powers" and signed.numel() and max(-int(signed.min()), int(signed.max())) > levels:
        raise WireError(f"there are levels up to {levels}, got {int(signed.min())} to {int(signed.max())}")
    if (native := dispatch.native(signed, scales, out)) is None:
        return reference.levels_add_(signed, scales, segments, out, alpha, form)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    native.levels_add_(signed, scales, starts, sizes, out, alpha, levels, bucket, grid == "powers")
    return out


def quantised_nbytes(n: int, *, levels: int, bucket: int = 0, packing: str = "bits") -> int:
    """Bytes of a tensor of n elements in a message that `quantise` makes."""
    return Form(levels, bucket, packing=packing).message_nbytes(Segments.whole(n))


def _checked(
    x: Tensor, segments: Segments, keys: Sequence[int], form: Form, measure: Measure
) -> tuple[Tensor, Tensor, Tensor]:
    """Given scales and floors, or nothing, and the keys, as the native loops take them."""
    checks.buffer("x", x, segments)
    scales, floors = measure.given(form.buckets(segments))
    return scales, floors, checks.keys64(keys, len(segments))
