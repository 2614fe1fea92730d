# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Residual and velocity updates in Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.accumulate import reference
from laconic.kernels.launch import launch as launch_once
from laconic.kernels.tiles import table, tiles

TILE = 4096
EXPONENT = tl.constexpr(0x7F800000)
WAITING = tl.constexpr(reference.WAITING)
WARPS = {True: 8, False: 16}  # whole or not; masks take registers


@triton.jit
def _finite(x):
    return (x.to(tl.int32, bitcast=True) & EXPONENT) != EXPONENT


@triton.jit
def _places(
    starts,
    sizes,
    segments,
    firsts,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    segment = tl.load(segments + tl.program_id(0))
    first = tl.load(firsts + tl.program_id(0))
    start = tl.load(starts + segment) + first
    if ALIGNED:
        start = (start >> 2) * 4
    lane = tl.arange(0, TILE)
    return segment, start, lane, lane < tl.load(sizes + segment) - first


@triton.jit
def all_finite_kernel(
    x,
    flag,
    starts,
    sizes,
    segments,
    firsts,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    _, at, lane, there = _places(starts, sizes, segments, firsts, TILE, ALIGNED)
    value = tl.load(x + at + lane) if WHOLE else tl.load(x + at + lane, mask=there, other=0.0)
    clean = tl.min(_finite(value).to(tl.int32), 0)
    tl.store(flag, 1, mask=clean == 0)  # every program stores the same


@triton.jit
def accumulate_kernel(
    residual,
    grad,
    flag,
    scale,
    decay,
    starts,
    sizes,
    segments,
    firsts,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    _, at, lane, there = _places(starts, sizes, segments, firsts, TILE, ALIGNED)
    if WHOLE:
        old = tl.load(residual + at + lane)
        g = tl.load(grad + at + lane)
    else:
        old = tl.load(residual + at + lane, mask=there, other=0.0)
        g = tl.load(grad + at + lane, mask=there, other=0.0)
    new = old * decay + g * scale
    finite = _finite(new)
    new = tl.where(finite, new, old)
    kept = tl.where(finite, old, float("inf"))
    if WHOLE:
        tl.store(residual + at + lane, new)
        if KEEP:
            tl.store(grad + at + lane, kept)
    else:
        tl.store(residual + at + lane, new, mask=there)
        if KEEP:
            tl.store(grad + at + lane, kept, mask=there)
    tl.store(flag, 1, mask=tl.min(finite.to(tl.int32), 0) == 0)


@triton.jit
def velocity_kernel(
    velocity,
    residual,
    grad,
    fresh,
    flag,
    momentum,
    leads,
    shares,
    scale,
    starts,
    sizes,
    segments,
    firsts,
    NESTEROV: tl.constexpr,
    AHEAD: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    segment, at, lane, there = _places(starts, sizes, segments, firsts, TILE, ALIGNED)
    m = tl.load(momentum + segment)
    if WHOLE:
        u = tl.load(velocity + at + lane)
        v = tl.load(residual + at + lane)
        g = tl.load(grad + at + lane)
    else:
        u = tl.load(velocity + at + lane, mask=there, other=0.0)
        v = tl.load(residual + at + lane, mask=there, other=0.0)
        g = tl.load(grad + at + lane, mask=there, other=0.0)
    scaled = g * scale
    if NESTEROV:
        new_u = (u + scaled) * m
        new_v = v + new_u + scaled
    else:
        new_u = u * m + scaled
        new_v = v + new_u
    if AHEAD:
        lead = tl.load(leads + segment)
        waits = tl.abs(v) > tl.abs(new_u) * WAITING
        new_v = tl.where(waits, new_v + new_u * lead, new_v)
        new_u = tl.where(waits, new_u * tl.load(shares + segment), new_u)
    finite = _finite(new_u) & _finite(new_v)
    new_u = tl.where(finite, new_u, u)
    new_v = tl.where(finite, new_v, v)
    kept = tl.where(finite, u, float("inf"))
    if WHOLE:
        tl.store(velocity + at + lane, new_u)
        tl.store(grad + at + lane, kept)
        tl.store(fresh + at + lane, new_v)
    else:
        tl.store(velocity + at + lane, new_u, mask=there)
        tl.store(grad + at + lane, kept, mask=there)
        tl.store(fresh + at + lane, new_v, mask=there)
    tl.store(flag, 1, mask=tl.min(finite.to(tl.int32), 0) == 0)


def all_finite(x: Tensor, segments: Segments) -> bool:
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch(all_finite_kernel, segments.merged, (x, flag))
    return flag.item() == 0


def accumulate_(
    residual: Tensor, grad: Tensor, segments: Segments, scale: float, decay: float, keep: bool
) -> bool:
    flag = torch.zeros(1, dtype=torch.int32, device=grad.device)
    launch(accumulate_kernel, segments.merged, (residual, grad, flag, float(scale), float(decay)), (keep,))
    return flag.item() == 0


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
    values = tuple(momentum.tolist())
    if len(set(values)) == 1:  # fewer, longer ranges
        segments = segments.merged
        values = values[:1] * len(segments)
    flag = torch.zeros(1, dtype=torch.int32, device=grad.device)
    factors = momentum_tables(values, float(ahead), grad.device)
    arguments = (velocity, residual, grad, fresh, flag, *factors, float(scale))
    launch(velocity_kernel, segments, arguments, (nesterov, ahead > 0))
    return flag.item() == 0


def launch(
    kernel: Any, segments: Segments, arguments: tuple[Any, ...], constants: tuple[Any, ...] = ()
) -> None:
    """Launch a kernel for all whole tiles, then for the shorter last ones."""
    device = arguments[0].device
    with dispatch.device_of(arguments[0]):
        for grid, tables, fixed, warps in _launches(segments, device):
            launch_once(kernel, grid, *arguments, *tables, *constants, *fixed, num_warps=warps)


@lru_cache(maxsize=512)
def _launches(segments: Segments, device: torch.device) -> tuple[tuple[Any, ...], ...]:
    starts, sizes = table(segments.starts, device), table(segments.sizes, device)
    aligned = all(start % 4 == 0 for start in segments.starts)
    kinds = zip((True, False), tiles(segments.sizes, TILE, device), strict=True)
    return tuple(
        ((len(part),), (starts, sizes, part.segment, part.first), (TILE, aligned, whole), WARPS[whole])
        for whole, part in kinds
        if len(part)
    )


@lru_cache(maxsize=256)
def momentum_tables(values: tuple[float, ...], ahead: float, device: torch.device) -> tuple[Tensor, ...]:
    """Return momentum and its `leads`, float32 (s,). Cached: do not change them."""
    momentum = torch.tensor(values, dtype=torch.float32, device="cpu")
    return tuple(each.to(device) for each in (momentum, *reference.leads(momentum, ahead)))
