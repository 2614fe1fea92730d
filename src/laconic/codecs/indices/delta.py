"""Delta: the gaps between positions, in as few bytes as each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Delta(IndexCoding):
    """Wire: gap from the last position, less one, as LEB128: one byte per position for gaps up to 127.

    >>> import torch
    >>> indices = torch.tensor([3, 256], dtype=torch.int32)
    >>> Delta().encode(indices, torch.tensor([2]), Segments.whole(999)).tolist()
    [3, 252, 1]
    """

    status: ClassVar[Status] = "own"

    def encode(self, indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.delta_encode(indices, counts, segments)

    def decode(self, wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.delta_decode(wire, counts, segments)

    def nbytes(self, k: int, n: int) -> int:
        """Return k, plus one for each gap that can reach 2^7, 2^14, ...: at most n >> 7, n >> 14, ..."""
        k = min(k, n)
        return k + sum(min(k, n >> shift) for shift in (7, 14, 21, 28))
