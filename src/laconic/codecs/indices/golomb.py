"""Golomb: the gaps between positions, in about as many bits as random positions need.

Golomb 1966 ("Run-length encodings"); Rice 1979; for gradients Sattler et al. 2019, arXiv:1903.02891.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Golomb(IndexCoding):
    """Wire: low bits of the gaps less one, tensor by tensor, then all their high parts in unary.

    The number of low bits follows from (k, n). Size: about k (log2(n / k) + 1.5) bits, within 1 % of log2
    C(n, k) for random positions.

    >>> import torch
    >>> indices = torch.tensor([3, 256], dtype=torch.int32)
    >>> Golomb().encode(indices, torch.tensor([2]), Segments.whole(999)).numel()
    3
    """

    paper: ClassVar[str] = "Golomb 1966, Run-length encodings"
    status: ClassVar[Status] = "recalled"

    def encode(self, indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.rice_encode(indices, counts, segments)

    def decode(self, wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.rice_decode(wire, counts, segments)

    def positions(
        self, wires: Sequence[Tensor], counts: NDArray[np.int64], segments: Segments
    ) -> tuple[Tensor, int, Tensor]:
        places, wrong = kernels.rice_positions(wires, counts, segments)
        return places, 1, wrong

    def nbytes(self, k: int, n: int) -> int:
        return kernels.rice_bound(k, n)


GOLOMB = Golomb()
