"""Samples that estimate thresholds, for the exact top-k and for DGC's.

DGC: Lin et al. 2018, arXiv:1712.01887; geometry of its release code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.kernels.philox.reference import LOW, MULTIPLIERS, ROUNDS, WEYL

Words = np.ndarray[Any, np.dtype[np.uint64]]
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
SMALL = 1024  # shorter segments are not sampled


@dataclass(frozen=True)
class Sampling:
    """Samples of segments, and rules of selection by threshold.

    A segment's threshold t is the `ranks`-th largest of its `samples`, `strides` apart. Selected are the `ks`
    largest entries above the first of t, lower * t, ..., lower^rounds * t that at least `needs` reach, or
    else of all nonzero ones. Rank 0 means all entries, -1 none.
    """

    strides: tuple[int, ...]
    samples: tuple[int, ...]
    ranks: tuple[int, ...]
    needs: tuple[int, ...]
    ks: tuple[int, ...]
    rounds: int


def geometry(n: int, density: float, ratio: float) -> tuple[int, int, int]:
    """Return stride, number of samples m and the threshold's rank among them; stride 0: select exactly.

    There are at least ceil(ratio * n) and ceil(2 / density) samples. The stride is one more than a multiple
    of 8: no power-of-two layout aliases with it.

    >>> geometry(25_000_000, 0.001, 0.01)
    (97, 257731, 258)
    """
    need = math.ceil(min(2 / density, n))  # 2 / density may be infinite
    if n <= need:
        return 0, 0, 0
    wanted = max(math.ceil(n * ratio), need)
    stride = math.ceil(n / wanted / 32) * 32 + 1
    while n // stride < wanted and stride > 1:
        stride -= 8
    samples = n // stride
    return stride, samples, max(1, math.ceil(samples * density))


@lru_cache(maxsize=256)
def sampling(sizes: tuple[int, ...], density: float, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = [geometry(n, density, ratio) for n in sizes]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    strides, samples, ranks = (torch.tensor(column, dtype=torch.int64, device="cpu") for column in columns)
    return strides, samples, ranks


@lru_cache(maxsize=256)
def dgc_sampling(
    sizes: tuple[int, ...], ks: tuple[int, ...], density: float, ratio: float, lower: float, rounds: int
) -> Sampling:
    rows = []
    for n, k in zip(sizes, ks, strict=True):
        stride, samples, rank = geometry(n, density, ratio)
        enough = k + 1 if lower * k > k else math.ceil(lower * k)
        rows.append((stride, samples, rank if k > 0 else -1, enough, max(k, 0)))
    return _sampling(rows, rounds)


@lru_cache(maxsize=256)
def exact_sampling(sizes: tuple[int, ...], ks: tuple[int, ...]) -> Sampling:
    """Return samples that nearly always find at least k entries, and seldom many more.

    About e = m k / n samples are among the top k, give or take sqrt(e).
    """
    rows = []
    for n, k in zip(sizes, ks, strict=True):
        samples = max(SMALL // 2, min(n // 64, 4096), n // 256)
        expected = samples * k / n if n else 0.0
        rank = int(expected + 4 * math.sqrt(max(expected, 0.0)) + 4)
        if n <= SMALL or k >= n // 4 or rank >= samples:
            rank = 0
        rows.append((n // samples, samples, rank if k > 0 else -1, k, max(k, 0)))
    return _sampling(rows, 2)


def _sampling(rows: list[tuple[int, int, int, int, int]], rounds: int) -> Sampling:
    strides, samples, ranks, needs, ks = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return Sampling(strides, samples, ranks, needs, ks, rounds)


def sample_offsets(plan: Sampling, keys: Tensor) -> Tensor:
    """Return the start of each segment's sample, int64 (s,), below its stride, from its key int64 (s,).

    >>> sample_offsets(dgc_sampling((10_000,), (100,), 0.01, 0.01, 0.8, 10), torch.tensor([7]))
    tensor([46])
    """
    first = _first_words(keys.numpy().view(np.uint64))
    strides = np.array(plan.strides, dtype=np.uint64)
    return torch.from_numpy((first * strides >> np.uint64(32)).astype(np.int64))


def _first_words(keys: Words) -> Words:
    low, half = np.uint64(LOW), np.uint64(32)
    k0, k1 = keys & low, keys >> half
    c0 = c1 = c2 = c3 = np.zeros_like(keys)
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    return c0


def levels_of(threshold: Tensor) -> Tensor:
    """Return thresholds as bits, at least 1: zeros are never selected."""
    return magnitudes(threshold).clamp_(min=1)


@lru_cache(maxsize=64)
def sample_tables(
    sizes: tuple[int, ...], plan: Sampling, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return positions, segments, thresholds' places among sorted samples, and levels without a sample."""
    places, of, at, fixed = [], [], [], []
    start = taken = 0
    for i, size in enumerate(sizes):
        rank = plan.ranks[i]
        at.append(taken + rank - 1 if rank > 0 else 0)
        fixed.append(0 if rank > 0 else 1 if rank == 0 else MAGNITUDE)
        if rank > 0:
            places.append(
                start + torch.arange(plan.samples[i], dtype=torch.int64, device="cpu") * plan.strides[i]
            )
            of.append(torch.full((plan.samples[i],), i, dtype=torch.int64, device="cpu"))
            taken += plan.samples[i]
        start += size
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    return (
        torch.cat([empty, *places]).to(device),
        torch.cat([empty, *of]).to(device),
        torch.tensor(at, dtype=torch.int64, device=device),
        torch.tensor(fixed, dtype=torch.int32, device=device),
    )


def magnitudes(x: Tensor) -> Tensor:
    bits = x.view(torch.int32) & MAGNITUDE
    return torch.where(bits > INFINITY, 0, bits)
