"""Checks that a bucket is finite: for all routes at once, with one read from a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from laconic import kernels
from laconic.comm.void import VoidSum, largest_of, not_finite
from laconic.core.deferred import check
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn
from laconic.exchange.leg import Leg, Reduction


def corrected_by(
    legs: Sequence[tuple[Leg, Layout]], bucket: Tensor, turn: Turn, scale: float, free: Sequence[bool]
) -> list[Tensor | None]:
    """Return the input of each leg's reducer; None where it is not finite and the reducer cannot tell.

    `free`: for each leg, whether its part of the bucket may hold values of a memory.

    On a GPU one number is read for all inputs that neither the feedback nor the reducer checks: all of them
    become None together, as the step is skipped anyway.
    """
    corrected = [
        leg.feedback.correct(bucket, part, turn, scale, free=each)
        for (leg, part), each in zip(legs, free, strict=True)
    ]
    unknown = [
        (i, x, part)
        for i, ((leg, part), x) in enumerate(zip(legs, corrected, strict=True))
        if x is not None and leg.finite_is_unknown(turn.step) and part.numel
    ]
    if not unknown:
        return corrected
    if bucket.is_cpu:
        finite = [kernels.all_finite(x, part.segments) for _, x, part in unknown]
    else:
        finite = [_all_finite([(x, part.segments) for _, x, part in unknown])] * len(unknown)
    for (i, _, _), fine in zip(unknown, finite, strict=True):
        if not fine:
            corrected[i] = None
    return corrected


def check_means(reductions: Sequence[Reduction], bucket: Layout) -> None:
    """Raise `VoidSum` if a mean is not finite whose reducer does not check it; on a GPU as `deferred.check`.

    On a GPU all means of the bucket are checked at once. Ranks have the same means, so all of them raise.
    """
    unknown = [
        each
        for each in reductions
        if each.part.numel and not each.late and not each.leg.checks_mean(each.turn.step)
    ]
    if unknown and not unknown[0].out.is_cpu:
        check(not_finite(*bucket.segments.merged.views(unknown[0].out)), lambda _: VoidSum())
    elif not all(kernels.all_finite(each.out, each.part.segments.merged) for each in unknown):
        raise VoidSum


def _all_finite(parts: Sequence[tuple[Tensor, Segments]]) -> bool:
    """Return whether all of these ranges are finite, with one read from a GPU."""
    of: dict[int, tuple[Tensor, list[Segments]]] = {}
    for x, segments in parts:
        of.setdefault(id(x), (x, []))[1].append(segments)
    views = [view for x, some in of.values() for view in together(tuple(some)).views(x)]
    return math.isfinite(largest_of(views).item())


@lru_cache(maxsize=512)
def together(parts: tuple[Segments, ...]) -> Segments:
    """Return the ranges of all parts of one buffer, in the fewest runs.

    >>> together((Segments((0, 5), (2, 1)), Segments((2,), (3,))))
    Segments(starts=(0,), sizes=(6,))
    """
    starts = tuple(start for part in parts for start in part.starts)
    sizes = tuple(size for part in parts for size in part.sizes)
    return Segments(starts, sizes).merged


def first_not_finite(x: Tensor, layout: Layout) -> str | None:
    """Name of the first tensor of flat x that holds NaN or Inf."""
    views = zip(layout.names, layout.segments.views(x), strict=True)
    return next((name for name, view in views if not bool(view.isfinite().all())), None)
