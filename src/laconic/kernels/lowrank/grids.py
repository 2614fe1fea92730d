"""Grids and tables of the low-rank kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laconic.kernels.lowrank.matrices import Matrices

ROWS, COLS = 8, 256  # tile of M Q and of M += P Q^T
TALL, WIDE = 16, 128
HEIGHT = 256  # rows of a program of M^T P
LENGTH = 1024  # elements of a column per step of Gram-Schmidt
PART = 1024  # sums that one program adds

Tables = tuple[Tensor, ...]


@lru_cache(maxsize=512)
def rows(matrices: Matrices, device: torch.device) -> tuple[tuple[int], Tables]:
    programs = [(i, top) for i, m in enumerate(matrices.rows) for top in range(0, m, ROWS)]
    starts = (matrices.starts, matrices.rows, matrices.cols, *_places(matrices))
    return (len(programs),), _tables((*starts, *zip(*programs, strict=True)), device)


@lru_cache(maxsize=512)
def columns(matrices: Matrices, device: torch.device) -> tuple[tuple[int], Tables, int, tuple[int], Tables]:
    lefts, rights = _places(matrices)
    programs, places, counts, sizes, at = [], [], [], [], 0
    for i, (_, m, n) in enumerate(matrices):
        tops = range(0, m, HEIGHT)
        places.append(at)
        counts.append(len(tops))
        sizes.append(matrices.rank * n)
        for top in tops:
            programs += [(i, first, top, at) for first in range(0, n, WIDE)]
            at += sizes[-1]
    totals = [(i, first) for i, size in enumerate(sizes) for first in range(0, size, PART)]
    of = (matrices.starts, matrices.rows, matrices.cols, lefts)
    return (
        (len(programs),),
        _tables((*of, *zip(*programs, strict=True)), device),
        at,
        (len(totals),),
        _tables((places, counts, sizes, rights, *zip(*totals, strict=True)), device),
    )


@lru_cache(maxsize=512)
def factors(rank: int, lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[int], Tables]:
    return (len(lengths),), _tables((_starts(rank, lengths), lengths), device)


def _places(matrices: Matrices) -> tuple[list[int], list[int]]:
    return _starts(matrices.rank, matrices.rows), _starts(matrices.rank, matrices.cols)


def _starts(rank: int, lengths: tuple[int, ...]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += rank * length
    return starts


def _tables(columns: tuple[Any, ...], device: torch.device) -> Tables:
    return tuple(torch.tensor(list(each), dtype=torch.int64, device=device) for each in columns)
