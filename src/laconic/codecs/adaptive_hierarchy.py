"""Adaptive hierarchy: as many groups of magnitudes as a tensor needs for a required error.

Jiang et al. 2022, arXiv:2212.14760. Reconstruction from the abstract: error measure, doubling and wire are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.hierarchy import MOST, Hierarchy
from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.framing import read_bytes
from laconic.core.spec import Status
from laconic.core.tensor_codec import TensorCodec
from laconic.kernels.tiles import table


def _edges(n: int, groups: int) -> list[int]:
    return [-(-g * n // groups) for g in range(groups)] + [n]


@dataclass(frozen=True, repr=False)
class AdaptiveHierarchy(TensorCodec):
    """`hierarchy(levels=L)` with the first L of 1, 2, 4, ... whose squared error is at most `error` * |x|^2.

    Otherwise L = `most`. Wire: L - 1 uint8, then the wire of `hierarchy(levels=L)`. Error: at most the larger
    of `error` and the omega of `hierarchy(levels=most)`.

    >>> codec = AdaptiveHierarchy(error=0.01)
    >>> [codec.encode(torch.tensor(x))[0].item() + 1 for x in ([2.0, 2.0, -2.0], [4.0, -1.0, 4.0, 1.0])]
    [1, 2]
    """

    error: float = 0.05
    most: int = 16

    fixed_size: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Jiang et al. 2022, arXiv:2212.14760"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "adaptive_hierarchy()",
        "adaptive_hierarchy(error=0.001, most=256)",
        "sparse(topk(density=0.05), values=adaptive_hierarchy(), indices=golomb())",
    )

    def __post_init__(self) -> None:
        arguments.number("adaptive_hierarchy: error", self.error, above=0, below=1)
        arguments.whole("adaptive_hierarchy: most", self.most, 1, MOST)

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        levels = self._levels(x)
        wire = Hierarchy(levels).encode(x, key)
        return torch.cat([torch.full((1,), levels - 1, dtype=torch.uint8, device=x.device), wire])

    def _levels(self, x: Tensor) -> int:
        """Return the least of 1, 2, 4, ..., `most` that meets the bound.

        A group of l magnitudes s, sent as m, loses sum s^2 - 2 m sum s + l m^2.
        """
        n = x.numel()
        choices = [1]
        while choices[-1] < min(self.most, n):
            choices.append(min(2 * choices[-1], self.most))
        edges = {levels: _edges(n, min(levels, n)) for levels in choices} if n else {}
        union = sorted({edge for each in edges.values() for edge in each})
        if len(union) < 2:
            return 1
        lengths = table(tuple(b - a for a, b in pairwise(union)), x.device)
        ordered = x.abs().sort(descending=True).values.to(torch.float64)
        parts = [
            torch.segment_reduce(each, "sum", lengths=lengths, unsafe=True)
            for each in (ordered, ordered.square())
        ]
        first, second = ([0.0, *accumulate(row)] for row in torch.stack(parts).tolist())
        at = {edge: i for i, edge in enumerate(union)}
        for levels in choices:
            lost = 0.0
            for begin, end in pairwise(edges[levels]):
                i, j, length = at[begin], at[end], end - begin
                total, squares = first[j] - first[i], second[j] - second[i]
                mean = float(np.float32(total / length))
                lost += squares - 2 * mean * total + length * mean * mean
            if lost <= self.error * second[-1]:
                return levels
        return self.most

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        head, rest = read_bytes(wire, 1, "the number of levels")
        levels = 1 + int(head)
        if levels > self.most:
            raise WireError(f"{self!r}: at most {self.most} levels are sent, got {levels}")
        return Hierarchy(levels).decode(rest.clone(), n)

    def nbytes(self, n: int) -> int:
        return 1 + Hierarchy(self.most).nbytes(n)

    def omega(self, n: int) -> float:
        return max(self.error, Hierarchy(self.most).omega(n)) if n else 0.0
