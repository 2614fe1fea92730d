"""Min-max quantisation: each element as one of evenly spaced values between its block's extremes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.minmax import reference
from laconic.kernels.minmax.form import LONGEST as LONGEST
from laconic.kernels.minmax.form import WIDEST as WIDEST
from laconic.kernels.minmax.form import MinMaxForm as MinMaxForm
from laconic.kernels.minmax.form import minmax_nbytes as minmax_nbytes
from laconic.kernels.minmax.reference import FARTHEST as FARTHEST


def minmax_encode(x: Tensor, segments: Segments, keys: Sequence[int], form: MinMaxForm) -> Tensor:
    """One message uint8 (m,) of these ranges of x float32 (n,).

    For each tensor: [unit, minimum] float32 for each run of `block` elements, then the levels, the lowest
    bits first, padded to a byte. With L = 2^width - 1, a block's unit is (max - min) / L, and its elements
    become y = (x - min) / unit, rounded to nearest (halves upward), or, if stochastic, up or down at random
    by `dither24` of the tensor's key, so that the mean is y. Ends of a range beyond 2^126 are cut off there.
    Raises `NonFiniteError` for NaN and Inf; what is finite decodes to what is finite.

    >>> minmax_encode(torch.tensor([-1.0, 0.0, 2.0]), Segments.whole(3), [0], MinMaxForm((2,))).tolist()
    [0, 0, 128, 63, 0, 0, 128, 191, 52]
    """
    nbytes = form.message_nbytes(segments)
    checks.buffer("x", x, segments)
    packed = checks.keys64(keys, len(segments))
    if (native := dispatch.native(x)) is None:
        return reference.encode(x, segments, keys, form)
    wire = torch.empty(nbytes, dtype=torch.uint8)
    bad = native.minmax_encode(x, segments, packed, form, wire)
    if bad >= 0:
        raise reference.not_finite(bad, segments)
    return wire


def minmax_add_(
    wire: Tensor, segments: Segments, out: Tensor, form: MinMaxForm, alpha: float = 1.0
) -> Tensor:
    """out[segment] += alpha * (minimum + level * unit), of a message in this form, in place.

    Raises `WireError`, before anything is written, for a wrong length, a unit that is negative, a unit,
    minimum or maximum that is not finite, and padding that is not zero.
    """
    expected = form.message_nbytes(segments)
    checks.flat("wire", wire, torch.uint8)
    checks.buffer("out", out, segments)
    if wire.numel() != expected:
        raise WireError(f"a message of {expected} bytes is expected, got {wire.numel()}")
    if (native := dispatch.native(wire, out)) is None:
        return reference.add_(wire, segments, out, form, alpha)
    native.minmax_add_(wire, segments, out, form, alpha)
    return out
