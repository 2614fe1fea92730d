# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator"
"""Selection on a GPU in two passes over x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.core.selector import Padded
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.select.sample import Sampling, levels_of
from laconic.kernels.select.triton_kernels import (
    compact_kernel,
    count_kernel,
    levels_kernel,
    pick_kernel,
    trim_kernel,
)
from laconic.kernels.tiles import table, tiles

TILE = 4096
STEP = 4096  # entries per step of a program
BLOCK = 1024  # tiles per step of `pick_kernel`
SPARE = 4096  # room for unlikely candidates
Chosen = tuple[Tensor, Tensor]


def topk(x: Tensor, segments: Segments, plan: Sampling) -> Chosen:
    return _counted(lambda room: padded(x, segments, plan, None, 0.8, room))


def sampled_topk(x: Tensor, segments: Segments, plan: Sampling, keys: Tensor, lower: float) -> Chosen:
    drawn = sent_to(keys, x.device)
    return _counted(lambda room: padded(x, segments, plan, drawn, lower, room))


def above(x: Tensor, segments: Segments, threshold: Tensor) -> Chosen:
    levels = sent_to(levels_of(threshold).view(-1, 1), x.device)
    plan, guess = _fixed(segments, x.device, 1, (0,) * len(segments), segments.sizes), segments.numel // 16
    return _counted(lambda room: _reaching(x, plan, levels, room or guess + SPARE))


def padded(
    x: Tensor, segments: Segments, sampling: Sampling, keys: Tensor | None, lower: float, room: int = 0
) -> Padded:
    """Select without a wait. Without keys samples start at 0."""
    num = sampling.rounds + 2
    plan = _fixed(segments, x.device, num, sampling.needs, sampling.ks)
    levels = torch.empty((len(segments), num), dtype=torch.int32, device=x.device)
    if len(segments):
        columns = _columns(sampling, x.device)
        keyed = keys is not None
        tables = (plan.starts, keys if keyed else plan.starts, *columns, float(lower), num, STEP, keyed)
        with dispatch.device_of(x):
            launch(levels_kernel, (len(segments),), x, levels, *tables, num_warps=16)
    return _reaching(x, plan, levels, room or min(segments.numel, 16 * plan.most + SPARE))


def _counted(select: Callable[[int], Padded]) -> Chosen:
    """Select with one wait, unless the room was too small."""
    chosen = select(0)
    read = chosen.totals.cpu()
    found, total = read.sum(1).tolist()
    if found > chosen.room:
        chosen = select(found)
    return chosen.indices[:total], read[1].clone()


def _reaching(x: Tensor, plan: Plan, levels: Tensor, room: int) -> Padded:
    """Select the ks largest above the first level that `needs` entries reach."""
    device, s, tiles_of = x.device, plan.num, plan.num_tiles
    totals = torch.zeros((2, s), dtype=torch.int64, device=device)
    out = torch.empty(min(plan.most, room), dtype=torch.int32, device=device)
    if not tiles_of:
        return Padded(out[:0], totals, room)
    parts = [(size + 3) // 4 * 4 for size in (plan.levels * tiles_of, s, tiles_of, room, room)]
    scratch = torch.empty(sum(parts), dtype=torch.int32, device=device)
    counts, floors, offsets, indices, values = scratch.split_with_sizes(parts)
    values = values.view(torch.float32)
    with dispatch.device_of(x):
        for grid, tables, fixed in plan.launches:
            launch(count_kernel, grid, x, levels, counts, plan.rows, tiles_of, *tables, plan.levels, *fixed)
        chosen = (levels, counts, tiles_of, plan.rows, plan.needs, plan.ks, floors, totals, offsets, s)
        launch(pick_kernel, (s,), *chosen, plan.levels, BLOCK)
        ends = totals.cumsum(1)
        for grid, tables, fixed in plan.launches:
            written = (floors, totals, ends, offsets, plan.rows, indices, values, room)
            launch(compact_kernel, grid, x, *written, *tables, *fixed)
        launch(trim_kernel, (s,), indices, values, totals, ends, s, room, out, STEP // 2, num_warps=16)
    return Padded(out, totals, room)


@dataclass(frozen=True)
class Plan:
    """Tables of the segments, and launches for whole tiles and last ones."""

    num: int
    num_tiles: int
    levels: int
    most: int
    starts: Tensor
    rows: Tensor
    needs: Tensor
    ks: Tensor
    launches: tuple[tuple[Any, ...], ...]


@lru_cache(maxsize=256)
def _fixed(
    segments: Segments, device: torch.device, levels: int, needs: tuple[int, ...], ks: tuple[int, ...]
) -> Plan:
    sizes = segments.sizes
    starts = table(segments.starts, device)
    aligned = all(start % 4 == 0 for start in segments.starts)
    launches = tuple(
        ((len(part),), (starts, table(sizes, device), part.segment, part.first), (TILE, aligned, whole))
        for whole, part in zip((True, False), tiles(sizes, TILE, device), strict=True)
        if len(part)
    )
    rows = [0]
    for size in sizes:
        rows.append(rows[-1] + -(-size // TILE))
    most = sum(min(k, size) for k, size in zip(ks, sizes, strict=True))
    tables = (starts, table(tuple(rows), device), table(needs, device), table(ks, device))
    return Plan(len(sizes), rows[-1], levels, most, *tables, launches)


@lru_cache(maxsize=256)
def _columns(sampling: Sampling, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(table(each, device) for each in (sampling.strides, sampling.samples, sampling.ranks))
