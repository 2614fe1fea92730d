"""Tables of each program's tile and tensor.

Full tiles are apart from last ones: a masked load is not a 128-bit load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """Tiles of one kind: tensor `segment` int32 (t,) and its first element `first` int64 (t,)."""

    segment: Tensor
    first: Tensor

    def __len__(self) -> int:
        return self.segment.numel()


@lru_cache(maxsize=512)
def tiles(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[Tiles, Tiles]:
    """Return the full tiles of `tile` elements and the shorter last tiles.

    >>> full, last = tiles((5, 2), 2, torch.device("cpu"))
    >>> full.segment.tolist(), full.first.tolist(), last.segment.tolist(), last.first.tolist()
    ([0, 0, 1], [0, 2, 0], [0], [4])
    """
    full = [(i, first) for i, n in enumerate(sizes) for first in range(0, n - tile + 1, tile)]
    last = [(i, n - n % tile) for i, n in enumerate(sizes) if n % tile]
    return _table(full, device), _table(last, device)


@lru_cache(maxsize=512)
def table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers, int64 (s,). Cached: do not change it."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def _table(rows: list[tuple[int, int]], device: torch.device) -> Tiles:
    segment = torch.tensor([row[0] for row in rows], dtype=torch.int32, device=device)
    return Tiles(segment, torch.tensor([row[1] for row in rows], dtype=torch.int64, device=device))
