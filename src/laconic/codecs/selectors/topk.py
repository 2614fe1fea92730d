"""TopK: the largest entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from laconic.core.selector import DensitySelector, counts_per_segment
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class TopK(DensitySelector):
    """The k = ceil(density * n) largest |x_i|, exactly; the lower position first among equals.

    Error: |x - x_S|^2 <= (1 - k / n) |x|^2, with equality where all |x_i| are equal.

    >>> import torch
    >>> TopK(density=0.5).select(torch.tensor([0.1, -3.0, 0.2, 2.0])).tolist()
    [1, 3]
    """

    paper: ClassVar[str] = "Aji and Heafield 2017, arXiv:1704.05021"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("topk(density=0.01)", "topk(density=0.3)", "topk(density=1.0)")

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        return kernels.topk(x, segments, counts_per_segment(self.density, segments))
