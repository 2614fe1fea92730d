"""Grid of a message's tensors, one row per block.

A tensor takes whole rows, for a multiple of `GROUP` elements: its levels start at a byte, its random bits at
a Philox counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.tiles import table

GROUP = 16  # elements
SHORT = 4096  # longest block that is padded for short tensors


@dataclass(frozen=True)
class Rows:
    """Rows of `length` elements: tensor i has sizes[i] > 0 elements, blocks[i] blocks and rows[i] rows."""

    sizes: tuple[int, ...]
    length: int
    blocks: tuple[int, ...]
    rows: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return self.length * sum(self.rows)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        return Segments.consecutive(self.rows).starts

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        return tuple(self.length * rows - n for rows, n in zip(self.rows, self.sizes, strict=True))

    def gap_nbytes(self, width: int) -> tuple[int, ...]:
        return _gap_nbytes(self, width)

    @cached_property
    def idle_nbytes(self) -> tuple[int, ...]:
        return tuple(8 * (rows - blocks) for rows, blocks in zip(self.rows, self.blocks, strict=True))

    @cached_property
    def spans(self) -> list[int]:
        """Elements of each tensor and of the gap after it."""
        return _alternate(self.sizes, self.gaps)

    @cached_property
    def head_spans(self) -> list[int]:
        return _alternate((8 * count for count in self.blocks), self.idle_nbytes)

    def code_spans(self, width: int) -> list[int]:
        return _alternate(((n * width + 7) // 8 for n in self.sizes), self.gap_nbytes(width))

    @cached_property
    def _partial(self) -> tuple[tuple[int, int], ...]:
        ends = zip(self.firsts, self.blocks, self.sizes, strict=True)
        return tuple((first + b - 1, n % self.length) for first, b, n in ends if n % self.length)

    def partial(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return partly used rows, their last used place, and the mask of used places."""
        if not self._partial:
            return None
        rows, counts = (table(column, device) for column in zip(*self._partial, strict=True))
        places = torch.arange(self.length, dtype=torch.int64, device=device)
        return rows, (counts - 1)[:, None], places < counts[:, None]

    def owners(self, device: torch.device) -> Tensor:
        return _owners(self.rows, device)


@lru_cache(maxsize=512)
def _gap_nbytes(rows: Rows, width: int) -> tuple[int, ...]:
    pairs = zip(rows.rows, rows.sizes, strict=True)
    return tuple(rows.length * count * width // 8 - (n * width + 7) // 8 for count, n in pairs)


def _alternate(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return [each for pair in zip(first, second, strict=True) for each in pair]


@lru_cache(maxsize=512)
def rows_of(sizes: tuple[int, ...], block: int) -> Rows:
    longest = max(sizes)
    if longest <= block:
        ones = (1,) * len(sizes)
        return Rows(sizes, -(-longest // GROUP) * GROUP, ones, ones)
    blocks = tuple(-(-n // block) for n in sizes)
    multiple = GROUP // math.gcd(block, GROUP)
    return Rows(sizes, block, blocks, tuple(-(-count // multiple) * multiple for count in blocks))


@lru_cache(maxsize=512)
def alike(sizes: tuple[int, ...], widths: tuple[int, ...], block: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of tensors that share a grid."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, (n, width) in enumerate(zip(sizes, widths, strict=True)):
        if n:
            length = min(n, block).bit_length() if block > SHORT else 0
            found.setdefault((width, length), []).append(number)
    return tuple(tuple(numbers) for numbers in found.values())


@lru_cache(maxsize=512)
def _cuts(segments: Segments) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return lengths that cut a buffer at all ends of segments, and each segment's piece."""
    lengths, picked, at = [], {}, 0
    for start, number in sorted((start, number) for number, start in enumerate(segments.starts)):
        if start < at:
            return None
        lengths += [start - at, segments.sizes[number]]
        picked[number] = len(lengths) - 1
        at = start + segments.sizes[number]
    return tuple(lengths), tuple(picked[number] for number in range(len(segments)))


def pieces(x: Tensor, segments: Segments) -> list[Tensor]:
    """Return views of the ranges of flat x in one call, unlike `Segments.views`."""
    cuts = _cuts(segments)
    if cuts is None or len(segments) < 4:
        return segments.views(x)
    views = torch.split(x[: segments.end], list(cuts[0]))
    return [views[number] for number in cuts[1]]


@lru_cache(maxsize=512)
def _gaps(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
    zeros = torch.zeros(max(lengths), dtype=dtype, device="cpu").to(
        device
    )  # blocking: other streams may use it
    return tuple(zeros[:n] if n else None for n in lengths)


def filled(parts: Sequence[Tensor], gaps: tuple[int, ...]) -> Tensor:
    if not any(gaps):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    zeros = _gaps(gaps, parts[0].dtype, parts[0].device)
    pairs = zip(parts, zeros, strict=True)
    return torch.cat([each for pair in pairs for each in pair if each is not None])


@lru_cache(maxsize=512)
def _owners(rows: tuple[int, ...], device: torch.device) -> Tensor:
    counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return torch.arange(len(rows), dtype=torch.int64, device="cpu").repeat_interleave(counts).to(device)
