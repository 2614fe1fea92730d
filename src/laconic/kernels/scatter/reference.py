"""Read and write chosen entries in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments


def positions(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Positions int64 (K,) in the flat buffer. Raises `WireError` if an index is outside its segment."""
    sizes = torch.repeat_interleave(segments.sizes_tensor, counts).to(indices.device)
    wide = indices.to(torch.int64)
    if bool(((wide < 0) | (wide >= sizes)).any()):
        raise WireError("an index lies outside its tensor")
    return wide + torch.repeat_interleave(segments.starts_tensor, counts).to(indices.device)


def gather(x: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    """The chosen entries, float32 (K,)."""
    return x[positions(indices, counts, segments)]


def scatter_add_(
    out: Tensor, segments: Segments, indices: Tensor, counts: Tensor, values: Tensor, alpha: float
) -> Tensor:
    """out[index] += alpha * value."""
    return out.index_add_(0, positions(indices, counts, segments), values * alpha)


def scatter_zero_(out: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    """out[index] = 0."""
    return out.index_fill_(0, positions(indices, counts, segments), 0.0)
