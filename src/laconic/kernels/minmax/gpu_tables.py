"""Tables of the tiles and heads of messages, one row per program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.minmax.form import minmax_nbytes

TILE, CHUNK = 4096, 256  # elements of a tile; heads per program
COLUMNS = 6


@dataclass(frozen=True)
class Tables:
    """Tables int64 (t, 6) of whole tiles, shorter ones and heads."""

    whole: Tensor
    rest: Tensor
    heads: Tensor
    aligned: bool  # to 4 elements
    words: bool  # heads and levels start at multiples of 4 bytes

    @cached_property
    def tiles(self) -> tuple[tuple[Tensor, tuple[int], bool], ...]:
        both = ((self.whole, False), (self.rest, True))
        return tuple((table, (len(table),), masked) for table, masked in both if len(table))


@lru_cache(maxsize=256)
def tables_of(
    messages: tuple[Segments, ...],
    begins: tuple[int, ...],
    width: int,
    block: int,
    device: torch.device,
    by_tensor: bool,
    stride: int = 0,
) -> Tables:
    """Return tables; a tile's number is that of its tensor or message."""
    whole, rest, heads = [], [], []
    for message, (segments, begin) in enumerate(zip(messages, begins, strict=True)):
        at = begin
        for tensor, (start, n) in enumerate(segments):
            if n:
                body = at + minmax_nbytes(n, 0, block)
                end = at + minmax_nbytes(n, width, block)
                number = tensor if by_tensor else message
                tiles = _tiles(start, at, body, n, number, width, block)
                whole.append(tiles[: n // TILE])
                rest.append(tiles[n // TILE :])
                heads.append(_heads(at, body, end, n * width % 8, number))
                at = end
    every = np.concatenate([*whole, *rest, np.empty((0, COLUMNS), dtype=np.int64)])
    return Tables(
        _table(whole, device),
        _table(rest, device),
        _table(heads, device),
        bool((every[:, 0] % 4 == 0).all()),
        bool((every[:, 1:3] % 4 == 0).all()) and stride % 4 == 0,
    )


def _tiles(start: int, head: int, body: int, n: int, number: int, width: int, block: int) -> Any:
    """Return rows: starts in buffer, heads and levels; first element, elements, number."""
    first = np.arange(0, n, TILE, dtype=np.int64)
    columns = (
        start + first,
        head + first // block * 8,
        body + first // 8 * width,
        first,
        np.minimum(TILE, n - first),
        np.full_like(first, number),
    )
    return np.stack(columns, axis=1)


def _heads(at: int, body: int, end: int, used: int, number: int) -> Any:
    """Return rows: start, count; last byte and its used bits; number, 0."""
    first = np.arange(at, body, 8 * CHUNK, dtype=np.int64)
    table = np.zeros((len(first), COLUMNS), dtype=np.int64)
    table[:, 0] = first
    table[:, 1] = np.minimum(CHUNK, (body - first) // 8)
    table[:, 2] = end - 1
    table[:, 3] = used or 8
    table[:, 4] = number
    return table


def _table(parts: list[Any], device: torch.device) -> Tensor:
    rows = np.concatenate([*parts, np.empty((0, COLUMNS), dtype=np.int64)])
    return torch.from_numpy(rows).to(device)
