"""Min-max quantisation: each element as one of evenly spaced values between its bucket's extremes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.minmax import reference
from laconic.kernels.minmax.reference import FARTHEST as FARTHEST

WIDEST = 8  # bits of a level
LONGEST = 1 << 31  # elements of a bucket


def minmax_nbytes(n: int, width: int, bucket: int) -> int:
    """Bytes of the wire of n elements: 8 for each bucket, then levels of `width` bits."""
    return reference.nbytes(n, width, bucket)


def minmax_encode(
    x: Tensor, segments: Segments, keys: Sequence[int], widths: Sequence[int], bucket: int, stochastic: bool
) -> Tensor:
    """One message uint8 (m,) of these ranges of x float32 (n,); `widths` has the bits (1..8) of each.

    For each tensor: [unit, minimum] float32 for each run of `bucket` elements, then the levels, the lowest
    bits first, padded to a byte. With L = 2^width - 1, a bucket's unit is (max - min) / L, and its elements
    become y = (x - min) / unit, rounded to nearest (halves upward), or, if `stochastic`, up or down at random
    by `dither24` of the tensor's key, so that the mean is y. Ends of a range beyond 2^126 are cut off there.
    Raises `NonFiniteError` for NaN and Inf; what is finite decodes to what is finite.

    >>> minmax_encode(torch.tensor([-1.0, 0.0, 2.0]), Segments.whole(3), [0], [2], 512, False).tolist()
    [0, 0, 128, 63, 0, 0, 128, 191, 52]
    """
    _check(segments, widths, bucket)
    checks.buffer("x", x, segments)
    at = checks.keys64(keys, len(segments))
    if (native := dispatch.native(x)) is None:
        return reference.encode(x, segments, keys, widths, bucket, stochastic)
    wire = torch.empty(_message(segments, widths, bucket), dtype=torch.uint8)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    bad = native.minmax_encode(x, starts, sizes, at, _tensor(widths), bucket, stochastic, wire)
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return wire


def minmax_add_(
    wire: Tensor, segments: Segments, out: Tensor, widths: Sequence[int], bucket: int, alpha: float = 1.0
) -> Tensor:
    """out[segment] += alpha * (minimum + level * unit), of a message of these widths, in place.

    Raises `WireError`, before anything is written, for a wrong length, a unit that is negative, a unit or
    minimum that is not finite, and padding that is not zero.
    """
    _check(segments, widths, bucket)
    checks.flat("wire", wire, torch.uint8)
    checks.buffer("out", out, segments)
    expected = _message(segments, widths, bucket)
    if wire.numel() != expected:
        raise WireError(f"a message of {expected} bytes is expected, got {wire.numel()}")
    if (native := dispatch.native(wire, out)) is None:
        return reference.add_(wire, segments, out, alpha, widths, bucket)
    starts, sizes = segments.starts_tensor, segments.sizes_tensor
    native.minmax_add_(wire, starts, sizes, _tensor(widths), bucket, out, alpha)
    return out


def _message(segments: Segments, widths: Sequence[int], bucket: int) -> int:
    return sum(minmax_nbytes(n, width, bucket) for n, width in zip(segments.sizes, widths, strict=True))


def _tensor(widths: Sequence[int]) -> Tensor:
    return torch.tensor(widths, dtype=torch.int64)


def _check(segments: Segments, widths: Sequence[int], bucket: int) -> None:
    arguments.whole("bucket", bucket, 1, LONGEST)
    if len(widths) != len(segments):
        raise ValueError(f"one width a segment is needed ({len(segments)}), got {len(widths)}")
    for width in set(widths):
        arguments.whole("width", width, 1, WIDEST)
