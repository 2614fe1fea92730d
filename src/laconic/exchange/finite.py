"""Checks that a bucket is finite: for all routes at once, with one read from a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.void import extremes
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.leg import Leg


def corrected_by(
    legs: Sequence[tuple[Leg, Layout]], bucket: Tensor, turn: Turn, scale: float
) -> list[Tensor | None]:
    """Return the input of each leg's reducer; None where it is not finite and the reducer cannot tell."""
    corrected = [leg.correct(bucket, part, turn, scale) for leg, part in legs]
    unknown = [
        (i, x, part)
        for i, ((leg, part), x) in enumerate(zip(legs, corrected, strict=True))
        if x is not None and leg.finite_is_unknown and part.numel
    ]
    if not unknown:
        return corrected
    if bucket.is_cpu:
        finite = [kernels.all_finite(x, part.segments) for _, x, part in unknown]
    else:
        ends = torch.stack([extremes(part.segments.merged.gathered(x)) for _, x, part in unknown]).tolist()
        finite = [all(map(math.isfinite, pair)) for pair in ends]
    for (i, _, _), fine in zip(unknown, finite, strict=True):
        if not fine:
            corrected[i] = None
    return corrected


def first_not_finite(x: Tensor, layout: Layout) -> str | None:
    """Name of the first tensor of flat x that holds NaN or Inf."""
    views = zip(layout.names, layout.segments.views(x), strict=True)
    return next((name for name, view in views if not bool(view.isfinite().all())), None)
