"""Split of sparse signed levels into positions, magnitudes and signs."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.levels import reference
from laconic.kernels.levels.reference import FURTHEST as FURTHEST

SPARE = 16  # elements that a full-width store may overrun


def split_levels(levels: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split levels int32 (N,), segment by segment, into parts of the K nonzero ones.

    Returns positions within the segment, int32 (K,); counts int64 (s,); magnitudes, int32 (K,); and signs, 1
    is negative, lowest bit first, uint8 (ceil(K / 8),).

    >>> levels = torch.tensor([0, -3, 0, 2], dtype=torch.int32)
    >>> [part.tolist() for part in split_levels(levels, Segments.consecutive([3, 1]))]
    [[1, 0], [1, 1], [3, 2], [1]]
    """
    checks.flat("levels", levels, torch.int32)
    if levels.numel() != segments.numel:
        raise ValueError(f"{segments.numel} elements have as many levels, got {levels.numel()}")
    if (native := dispatch.native(levels)) is None:
        return reference.split_levels(levels, segments)
    counts = torch.empty(len(segments), dtype=torch.int64, device="cpu")
    native.nonzero_counts(levels, segments.sizes_tensor, counts)
    total = int(counts.sum())
    indices, magnitudes = (torch.empty(total + SPARE, dtype=torch.int32, device="cpu") for _ in range(2))
    signs = torch.empty((total + 7) // 8, dtype=torch.uint8, device="cpu")
    native.split_levels(levels, segments.sizes_tensor, indices, magnitudes, signs)
    return indices[:total], counts, magnitudes[:total], signs


def join_levels(
    indices: Tensor, counts: Tensor, magnitudes: Tensor, signs: Tensor, segments: Segments, most: int
) -> Tensor:
    """Invert `split_levels`: levels int32 (N,).

    Raises `WireError` for a magnitude outside 1..most and for signs of wrong length or padding. Positions
    must ascend within segments.
    """
    checks.chosen(indices, counts, segments)
    checks.flat("magnitudes", magnitudes, torch.int32)
    checks.flat("signs", signs, torch.uint8)
    total = indices.numel()
    if magnitudes.numel() != total or signs.numel() != (total + 7) // 8:
        raise WireError(
            f"{total} levels have as many magnitudes and {(total + 7) // 8} bytes of signs, "
            f"got {magnitudes.numel()} and {signs.numel()}"
        )
    if total % 8 and int(signs[-1]) >> total % 8:
        raise WireError("the bits after the last sign must be zero")
    if (native := dispatch.native(indices, magnitudes, signs)) is not None:
        levels = torch.zeros(segments.numel, dtype=torch.int32, device="cpu")
        fine = native.join_levels(indices, counts, segments.sizes_tensor, magnitudes, signs, most, levels)
    else:
        fine = not total or 1 <= int(magnitudes.min()) <= int(magnitudes.max()) <= most
        levels = reference.join_levels(indices, counts, magnitudes, signs, segments)
    if not fine:
        raise WireError(f"levels that are not zero have magnitudes in 1..{most}")
    return levels


def places_of(steps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return running sums of steps int32 (K,) from -1 in each range, int32 (K,), and totals int64 (s,).

    Ranges have `counts` int64 (s,) elements. Steps are positive; sums are at most 2^31 - 1.

    >>> steps = torch.tensor([2, 1, 5], dtype=torch.int32)
    >>> places_of(steps, torch.tensor([2, 1]))
    (tensor([1, 2, 4], dtype=torch.int32), tensor([3, 5]))
    """
    _check(steps, counts)
    if (native := dispatch.native(steps)) is None:
        return reference.places_of(steps, counts)
    places, sums = torch.empty_like(steps), torch.empty_like(counts)
    native.places_of(steps, counts, places, sums)
    return places, sums


def steps_of(places: Tensor, counts: Tensor) -> Tensor:
    """Invert `places_of`, int32 (K,)."""
    _check(places, counts)
    if (native := dispatch.native(places)) is None:
        return reference.steps_of(places, counts)
    steps = torch.empty_like(places)
    native.steps_of(places, counts, steps)
    return steps


def _check(values: Tensor, counts: Tensor) -> None:
    checks.flat("values", values, torch.int32)
    checks.flat("counts", counts, torch.int64)
    if int(counts.sum()) != values.numel() or (counts.numel() and int(counts.min()) < 0):
        raise ValueError(f"counts must add up to the {values.numel()} values, got {int(counts.sum())}")
