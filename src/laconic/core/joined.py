"""Addition of one tensor to several segments of a flat buffer, in a few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments


def add_joined_(out: Tensor, segments: Segments, values: Tensor, alpha: float = 1) -> Tensor:
    """Add alpha times values (sum of sizes,) to the segments of flat `out`."""
    views = segments.joined.views(out)
    if len(views) == 1:
        views[0].add_(values, alpha=alpha)
    elif views:
        torch._foreach_add_(views, torch.split(values, list(segments.joined.sizes)), alpha=alpha)
    return out
