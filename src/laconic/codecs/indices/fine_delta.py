"""Fine delta: the gaps between positions, in a few bit widths that suit the tensor best.

Yang et al. 2021, arXiv:2112.04291 ("FastSGD"). Reconstruction from the abstract: the widths are found by
dynamic programming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class FineDelta(IndexCoding):
    """Wire per tensor, low bits first: log2 m in 2 bits, m = 1, 2, 4 or 8; m ascending widths in 5 bits each.

    Then log2 m bits per gap that choose its width; the gaps less one in these widths; padding to a byte.
    Random positions take more bits than with `golomb`; clustered ones fewer (docs/entropy.md).

    >>> import torch
    >>> indices = torch.tensor([3, 256], dtype=torch.int32)
    >>> FineDelta().encode(indices, torch.tensor([2]), Segments.whole(999)).numel()
    3
    """

    paper: ClassVar[str] = "Yang et al. 2021, arXiv:2112.04291"
    status: ClassVar[Status] = "reconstruction"

    def encode(self, indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.gap_widths_encode(indices, counts, segments)

    def decode(self, wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return kernels.gap_widths_decode(wire, counts, segments)

    def nbytes(self, k: int, n: int) -> int:
        return kernels.gap_widths_bound(k, n)
