"""Residual and velocity updates in plain torch: what the native kernels must equal, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments


def all_finite(x: Tensor, segments: Segments) -> bool:
    """True if no entry of the segments is NaN or infinite."""
    return all(bool(torch.isfinite(view).all()) for view in segments.views(x))


def accumulate_(residual: Tensor, grad: Tensor, segments: Segments, scale: float, decay: float) -> bool:
    """residual = decay * residual + scale * grad, where that is finite."""
    clean = True
    for r, g in zip(segments.views(residual), segments.views(grad), strict=True):
        new = r * decay + g * scale
        finite = torch.isfinite(new)
        r.copy_(torch.where(finite, new, r))
        clean &= bool(finite.all())
    return clean


def velocity_(
    velocity: Tensor,
    residual: Tensor,
    grad: Tensor,
    segments: Segments,
    momentum: Tensor,
    scale: float,
    nesterov: bool,
) -> bool:
    """u = m u + g, v = v + u; with Nesterov u = m (u + g), v = (v + u) + g; where both are finite."""
    clean = True
    views = zip(*(segments.views(x) for x in (velocity, residual, grad)), momentum.tolist(), strict=True)
    for u, v, g, m in views:
        scaled = g * scale
        new_u = (u + scaled) * m if nesterov else u * m + scaled
        new_v = v + new_u + scaled if nesterov else v + new_u
        finite = torch.isfinite(new_u) & torch.isfinite(new_v)
        u.copy_(torch.where(finite, new_u, u))
        v.copy_(torch.where(finite, new_v, v))
        clean &= bool(finite.all())
    return clean


def add_sparse_(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """x += alpha * y where y is not zero."""
    return x.copy_(torch.where(y == 0, x, x + y * alpha))
