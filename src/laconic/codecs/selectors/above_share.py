"""Above share: the entries that are large relative to the largest of their tensor.

The threshold filter of Yang et al. 2021, arXiv:2112.04291 ("FastSGD"). Reconstruction from the abstract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from laconic.core.selector import Selector
from laconic.core.spec import Status

LEAST = 2.0**-149  # smallest float32 above zero
LEAST_SHARE = 1e-30


@dataclass(frozen=True, repr=False)
class AboveShare(Selector):
    """Every nonzero |x_i| >= share * max |x| of its tensor. NaN and Inf raise `NonFiniteError`.

    Error: at most n - 1 entries are dropped: |x - x_S|^2 <= d / (1 + d) |x|^2 with d = (n - 1) share^2.

    >>> AboveShare(share=0.5).select(torch.tensor([0.1, -3.0, 1.0, 1.5])).tolist()
    [1, 3]
    """

    share: float

    paper: ClassVar[str] = "Yang et al. 2021, arXiv:2112.04291"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "above_share(share=0.2)",
        "above_share(share=0.05)",
        "above_share(share=1.0)",
    )

    def __post_init__(self) -> None:
        arguments.number("above_share: share", self.share, least=LEAST_SHARE, most=1)

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        kernels.addressable(segments.sizes)
        largest = torch.zeros(len(segments), dtype=torch.float32, device="cpu")
        largest[segments.sizes_tensor > 0] = kernels.norms(x, segments).cpu()
        if not bool(largest.isfinite().all()):
            raise NonFiniteError("nothing is large beside NaN or Inf: skip such a step, as `compress` does")
        limits = largest * torch.tensor(self.share, dtype=torch.float64, device="cpu").float()
        return kernels.above(x, segments, limits.clamp_(min=LEAST))

    def max_count(self, n: int) -> int:
        return n

    def omega(self, n: int) -> float:
        left = max(n - 1, 0) * self.share**2
        return left / (1 + left) * (1 + 1e-6)  # the limit is rounded to float32
