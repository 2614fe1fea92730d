"""Seconds of one worker's part of choosing what to send, in a group of N: CPU time of one thread.

    gather      the k largest of each tensor
    DEFT        norms of every N-th piece, the shares of all, the largest in one bin of N
    MiCRO       what reaches the threshold in one part of N
    Ok-Topk     the k largest of each tensor, and their values
    CGX         nothing is chosen: to encode the whole message

Pieces, bins and parts follow from the layout and are made before. A buffer of ResNet-50's tensors, cubes of
normal numbers times a scale a tensor; the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.resnet50 import SIZES
from benchmarks.common.timing import Call, rounds
from laconic import kernels
from laconic.codecs.minmax import MinMax
from laconic.core.layout import Layout
from laconic.core.selector import counts_per_segment
from laconic.reducers.deft import Deft
from laconic.reducers.deft.bins import Bins, allot
from laconic.reducers.deft.borders import Borders
from laconic.reducers.entries import Entries

LAYOUT = Layout.of((f"layer{i}", (1, size)) for i, size in enumerate(SIZES))


def seconds_to_select(sizes: Sequence[int], density: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each method and number of workers."""
    x = heavy_tailed()
    found = []
    for name, make in MAKERS.items():
        calls = {str(size): make(x, size, density) for size in sizes}
        times = timed(calls, rounds)
        found += [{"name": name, "workers": size, "seconds": times[str(size)]} for size in sizes]
    return found


def timed(calls: dict[str, Call], count: int) -> dict[str, float]:
    """The median time of each call."""
    return {name: statistics.median(times) for name, times in rounds(calls, count).items()}


def heavy_tailed() -> Tensor:
    """Flat float32 (n,), of scales from 1 to 100 by tensor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LAYOUT.numel, generator=generator).pow_(3)
    for view, scale in zip(
        LAYOUT.segments.views(x), torch.rand(len(LAYOUT), generator=generator), strict=True
    ):
        view.mul_(100 ** float(scale))
    return x


def largest(x: Tensor, size: int, density: float) -> Call:
    """gather: every rank looks at everything."""
    ks = counts_per_segment(density, LAYOUT.segments)
    return lambda: kernels.topk(x, LAYOUT.segments, ks)


def deft(x: Tensor, size: int, density: float) -> Call:
    """The first rank of the first step. The norms of the others are there."""
    bins, budget = Bins.of(LAYOUT, size), Deft(density).budget(LAYOUT.numel)
    told = [bins.norms(x, rank, 0) for rank in range(size)]

    def select() -> object:
        own = bins.norms(x, 0, 0)
        norms = bins.all_norms([own, *told[1:]], 0)
        ks = allot(norms, bins.pieces.sizes_tensor, budget)
        return bins.select(x, ks, 0, 0)

    return select


def micro(x: Tensor, size: int, density: float) -> Call:
    """The first part, with the threshold that the density asks for."""
    part = Borders.even(size, size).parts(LAYOUT)[0]
    threshold = float(x.abs().topk(round(density * x.numel())).values[-1])
    thresholds = torch.full((len(LAYOUT),), threshold)
    return lambda: kernels.above(x, part, thresholds)


def oktopk(x: Tensor, size: int, density: float) -> Call:
    """Every rank looks at everything here too."""
    ks = counts_per_segment(density, LAYOUT.segments)
    return lambda: Entries.largest(x, LAYOUT.segments, ks)


def cgx(x: Tensor, size: int, density: float) -> Call:
    """The message of all elements."""
    codec, keys = MinMax(bits=4), [0] * len(LAYOUT)
    return lambda: codec.encode_segments(x, LAYOUT.segments, keys)


MAKERS = {"gather": largest, "DEFT": deft, "MiCRO": micro, "Ok-Topk": oktopk, "CGX, 4 bits": cgx}
