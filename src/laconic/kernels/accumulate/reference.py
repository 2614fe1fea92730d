"""Residual and velocity updates in plain torch."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.layout import Segments

Factor = float | Tensor
WAITING = 0.25  # an entry waits if its residual is more than this share of its velocity
LONGEST = 0.98  # momentum; with more, nothing is added ahead


def all_finite(x: Tensor, segments: Segments) -> bool:
    views = [view for view in segments.merged.views(x) if view.numel()]
    return _all([torch.linalg.vector_norm(view, math.inf) < math.inf for view in views])


def accumulate_(
    residual: Tensor, grad: Tensor, segments: Segments, scale: float, decay: float, keep: bool
) -> bool:
    flags = []
    runs = segments.merged
    for r, g in zip(runs.views(residual), runs.views(grad), strict=True):
        new = _times(g, scale)
        new = r + new if decay == 1 else (r * decay).add_(new)
        finite = _finite(new)
        flags.append(finite.all())
        if keep:
            _keep(g, r, finite, flags[-1])
        _write(r, r, new, finite, flags[-1])
    return _all(flags)


def velocity_(
    velocity: Tensor,
    residual: Tensor,
    grad: Tensor,
    fresh: Tensor,
    segments: Segments,
    momentum: Tensor,
    scale: float,
    nesterov: bool,
    ahead: float,
) -> bool:
    flags = []
    runs = segments.merged
    views = zip(*(runs.views(x) for x in (velocity, residual, grad, fresh)), strict=True)
    factors = (_factors(each, segments, grad.device) for each in (momentum, *leads(momentum, ahead)))
    for (u, v, g, new), m, lead, kept in zip(views, *factors, strict=True):
        scaled = _times(g, scale)
        new_u = (u + scaled).mul_(m) if nesterov else (u * m).add_(scaled)
        new_v = v + new_u
        if nesterov:
            new_v.add_(scaled)
        if ahead:
            waits = v.abs() > new_u.abs() * WAITING
            new_v = torch.where(waits, new_v + new_u * lead, new_v)
            new_u = torch.where(waits, new_u * kept, new_u)
        finite = _finite(new_u).logical_and_(_finite(new_v))
        flags.append(finite.all())
        _keep(g, u, finite, flags[-1])
        _write(u, u, new_u, finite, flags[-1])
        _write(new, v, new_v, finite, flags[-1])
    return _all(flags)


def leads(momentum: Tensor, ahead: float) -> tuple[Tensor, Tensor]:
    """Return the factors of velocities that are added ahead and kept, float32 (s,).

    >>> leads(torch.tensor([0.5, 1.0]), ahead=0.5)
    (tensor([0.5000, 0.0000]), tensor([0.5000, 1.0000]))
    """
    longer, kept = momentum > LONGEST, torch.full_like(momentum, 1 - ahead)
    return (ahead * momentum / (1 - momentum)).masked_fill_(longer, 0.0), kept.masked_fill_(longer, 1.0)


def add_sparse_(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return x.copy_(torch.where(y == 0, x, x + y * alpha))


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _finite(x: Tensor) -> Tensor:
    return x.abs() < math.inf  # half the passes of isfinite


def _write(out: Tensor, old: Tensor, new: Tensor, finite: Tensor, clean: Tensor) -> None:
    if clean.is_cpu and bool(clean):
        out.copy_(new)
    else:
        torch.where(finite, new, old, out=out)


def _keep(grad: Tensor, old: Tensor, finite: Tensor, clean: Tensor) -> None:
    if clean.is_cpu and bool(clean):
        grad.copy_(old)
    else:
        torch.where(finite, old, _infinity(grad.device), out=grad)


@lru_cache(maxsize=64)
def _infinity(device: torch.device) -> Tensor:
    """Cached: do not modify."""
    return torch.tensor(math.inf, dtype=torch.float32, device=device)


def _all(flags: list[Tensor]) -> bool:
    return bool(torch.stack(flags).all() if len(flags) > 1 else flags[0]) if flags else True


def _factors(momentum: Tensor, segments: Segments, device: torch.device) -> list[Factor]:
    values = tuple(momentum.tolist())
    if len(set(values)) <= 1:
        return [value for value in values[:1] for _ in segments.merged.sizes]
    return segments.merged.packed.views(momentum_table(values, segments, device))  # type: ignore[return-value]


@lru_cache(maxsize=16)
def momentum_table(values: tuple[float, ...], segments: Segments, device: torch.device) -> Tensor:
    """Return each element's momentum, float32 (n,). Cached: do not change it."""
    ascending = sorted(zip(segments.starts, segments.sizes, values, strict=True))
    repeats = torch.tensor([size for _, size, _ in ascending], dtype=torch.int64, device="cpu")
    each = torch.tensor([value for _, _, value in ascending], dtype=torch.float32, device="cpu")
    return each.repeat_interleave(repeats).to(device)
