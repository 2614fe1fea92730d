"""How many entries of each tensor a density keeps."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.core.selector import kept


@lru_cache(maxsize=1024)
def kept_of_each(density: float, segments: Segments) -> Tensor:
    """`kept(density, size)` of each segment, int64 (s,). Shared between calls: not to be changed."""
    return torch.tensor([kept(density, size) for size in segments.sizes], dtype=torch.int64)
