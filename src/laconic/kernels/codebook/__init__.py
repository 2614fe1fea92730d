"""Codes of few bits with a table of values: groups of equal count, or powers of a base.

Wire per tensor: [values float32 | codes, packed as in `bitpack`], empty without elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.codebook import reference
from laconic.kernels.codebook.shapes import hierarchy_shape, powers_shape, quantile_shape

Shape = Callable[[int], tuple[int, int]]
MOST_LEVELS, MOST_BINS, MOST_POWERS = 256, 1 << 16, (1 << 15) - 1


def codebook_nbytes(shape: tuple[int, int], n: int) -> int:
    """Return the bytes of n codes for a shape (values, bits per code)."""
    numbers, bits = shape
    return 4 * numbers + (n * bits + 7) // 8


def hierarchy_encode(x: Tensor, segments: Segments, levels: int) -> Tensor:
    """Encode sign and one of `levels` (1..256) groups of equal count of |x|, largest first.

    >>> x = torch.tensor([4.0, -1.0, 2.0, 1.0])
    >>> hierarchy_encode(x, Segments.whole(4), levels=2).view(torch.uint8)[:8].view(torch.float32).tolist()
    [3.0, 1.0]
    """
    arguments.whole("levels", levels, 1, MOST_LEVELS)
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        wire = _room(x, segments, lambda n: hierarchy_shape(n, levels))
        _check_finite(native.hierarchy_encode(x, segments, levels, wire))
        return wire
    return reference.hierarchy_encode(x, segments, levels)


def hierarchy_add_(wire: Tensor, segments: Segments, out: Tensor, levels: int, alpha: float = 1.0) -> Tensor:
    """Add alpha * sign * mean of the group to each segment.

    Raises `WireError`, before any write, for bytes that no encoder makes.
    """
    arguments.whole("levels", levels, 1, MOST_LEVELS)
    _check(wire, segments, out, lambda n: hierarchy_shape(n, levels))
    if (native := dispatch.native(wire, out)) is not None:
        native.hierarchy_add_(wire, segments, levels, out, alpha)
        return out
    return reference.hierarchy_add_(wire, segments, out, levels, alpha)


def quantile_encode(x: Tensor, segments: Segments, bins: int) -> Tensor:
    """Encode x as one of `bins` (2..65536) groups of about equal count and single sign."""
    arguments.whole("bins", bins, 2, MOST_BINS)
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        wire = _room(x, segments, lambda n: quantile_shape(n, bins))
        _check_finite(native.quantile_encode(x, segments, bins, wire))
        return wire
    return reference.quantile_encode(x, segments, bins)


def quantile_add_(wire: Tensor, segments: Segments, out: Tensor, bins: int, alpha: float = 1.0) -> Tensor:
    """Add alpha * mean of the bin. Raises `WireError` as `hierarchy_add_`."""
    arguments.whole("bins", bins, 2, MOST_BINS)
    _check(wire, segments, out, lambda n: quantile_shape(n, bins))
    if (native := dispatch.native(wire, out)) is not None:
        native.quantile_add_(wire, segments, bins, out, alpha)
        return out
    return reference.quantile_add_(wire, segments, out, bins, alpha)


def powers_encode(x: Tensor, segments: Segments, bounds: Tensor) -> Tensor:
    """Encode sign and level: the number of bounds[l] * max |x| of its tensor that |x| reaches.

    bounds float32 (levels,) ascend from above 0 to at most 1. Level 0 has no sign; a zero is always level 0.
    """
    arguments.whole("levels", bounds.numel(), 1, MOST_POWERS)
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        wire = _room(x, segments, lambda n: powers_shape(n, bounds.numel()))
        _check_finite(native.powers_encode(x, segments, bounds, wire))
        return wire
    return reference.powers_encode(x, segments, bounds)


def powers_add_(wire: Tensor, segments: Segments, out: Tensor, powers: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha * sign * max |x| * powers[level - 1], nothing for level 0; powers float32 (levels,).

    Raises `WireError` as `hierarchy_add_`.
    """
    arguments.whole("levels", powers.numel(), 1, MOST_POWERS)
    _check(wire, segments, out, lambda n: powers_shape(n, powers.numel()))
    if (native := dispatch.native(wire, out)) is not None:
        native.powers_add_(wire, segments, powers, out, alpha)
        return out
    return reference.powers_add_(wire, segments, out, powers, alpha)


def _lengths(segments: Segments, shape: Shape) -> list[int]:
    return [codebook_nbytes(shape(n), n) for n in segments.sizes]


def _room(x: Tensor, segments: Segments, shape: Shape) -> Tensor:
    return torch.empty(sum(_lengths(segments, shape)), dtype=torch.uint8, device=x.device)


def _check(wire: Tensor, segments: Segments, out: Tensor, shape: Shape) -> None:
    checks.flat("wire", wire, torch.uint8)
    checks.buffer("out", out, segments)
    expected = sum(_lengths(segments, shape))
    if wire.numel() != expected:
        raise WireError(f"the codes of {len(segments)} tensors fill {expected} bytes, got {wire.numel()}")


def _check_finite(finite: bool) -> None:
    if not finite:
        raise NonFiniteError(reference.NOT_FINITE)
