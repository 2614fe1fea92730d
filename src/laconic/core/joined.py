"""The elements of several segments as one tensor, and back, in a few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments


def joined(x: Tensor, segments: Segments) -> Tensor:
    """Return the elements of all segments of flat x, in order; a view where the segments are neighbours."""
    views = segments.joined.views(x)
    return views[0] if len(views) == 1 else torch.cat([x[:0], *views])


def add_joined_(out: Tensor, segments: Segments, values: Tensor, alpha: float = 1) -> Tensor:
    """Add alpha times values (sum of sizes,) to the segments of flat `out`."""
    views = segments.joined.views(out)
    if len(views) == 1:
        views[0].add_(values, alpha=alpha)
    elif views:
        torch._foreach_add_(views, torch.split(values, list(segments.joined.sizes)), alpha=alpha)
    return out
