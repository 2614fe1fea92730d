"""Tables of a message's tiles.

Blocks are powers of two from 64 to 4,096 elements, each in one tile; or whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from laconic.core.layout import Segments

TILE = 4096
LEAST_BLOCK = 64


@dataclass(frozen=True)
class Plan:
    """Tables int64 with a column for each tile or tensor.

    Attributes:
        full, last, all: Whole tiles, last ones, and both. Rows: element in the buffer, bytes of signs and
            first mean, tensor, element in it, elements, number of the tile.
        tensors: First tile, tiles, elements, byte of the mean.
        aligned: Whether all tensors start at a multiple of 4 elements.
    """

    full: Tensor
    last: Tensor
    all: Tensor
    tensors: Tensor
    nbytes: int
    aligned: bool


@lru_cache(maxsize=128)
def plan(segments: Segments, block: int, apart: bool, device: torch.device) -> Plan:
    """Return the tables; `apart`: of [all means | all signs]."""
    sizes, starts = np.array(segments.sizes, np.int64), np.array(segments.starts, np.int64)
    tiles, signs = -(-sizes // TILE), (sizes + 7) // 8
    if apart:
        head = 4 * np.arange(len(sizes), dtype=np.int64)
        bits, nbytes = 4 * len(sizes) + _before(signs), 4 * len(sizes) + int(signs.sum())
    else:
        means = 4 * (-(-sizes // block) if block else np.minimum(sizes, 1))
        head, nbytes = _before(means + signs), int((means + signs).sum())
        bits = head + means
    tensor = np.repeat(np.arange(len(sizes), dtype=np.int64), tiles)
    slot = np.arange(len(tensor), dtype=np.int64)
    first = (slot - _before(tiles)[tensor]) * TILE
    count = np.minimum(sizes[tensor] - first, TILE)
    mean_at = head[tensor] + (4 * (first // block) if block else 0)
    rows = np.stack([starts[tensor] + first, bits[tensor] + first // 8, mean_at, tensor, first, count, slot])
    whole = count == TILE
    present = np.arange(len(sizes)) if apart else np.flatnonzero(sizes)
    tensors = np.stack([_before(tiles), tiles, sizes, head])[:, present]
    full, last, everything, owners = (
        torch.from_numpy(np.ascontiguousarray(each)).to(device)
        for each in (rows[:, whole], rows[:, ~whole], rows, tensors)
    )
    return Plan(full, last, everything, owners, nbytes, bool((starts % 4 == 0).all()))


def _before(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum(counts) - counts


def serves(block: int) -> bool:
    return block == 0 or (LEAST_BLOCK <= block <= TILE and block & (block - 1) == 0)
