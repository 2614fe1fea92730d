"""SampledTopK: nearly the largest entries, found with a threshold from a sample.

Lin et al. 2018, arXiv:1712.01887 (DGC), section 5, "hierarchical top-k selection".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.layout import Segments
from laconic.core.selector import DensitySelector, Padded, counts_per_segment
from laconic.core.spec import Status

LOWER = 0.8


@dataclass(frozen=True, repr=False)
class SampledTopK(DensitySelector):
    """The largest 0.8 k to k entries, k = ceil(density * n): faster than sorting.

    A strided sample of about `sample_ratio` * n entries, whose start the key draws, gives a threshold, which
    is lowered if too few pass; of more than k, the k largest are chosen. Up to ceil(2 / density) entries are
    selected exactly. Error: |x - x_S|^2 <= (1 - 0.8 k / n) |x|^2.

    >>> SampledTopK(density=0.01).max_count(1000)
    10
    """

    sample_ratio: float = 0.01

    paper: ClassVar[str] = "Lin et al. 2018, arXiv:1712.01887"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "synxlin/deep-gradient-compression"
    examples: ClassVar[tuple[str, ...]] = ("sampled_topk(density=0.01)", "sampled_topk(density=0.1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.number("sample_ratio", self.sample_ratio, above=0, most=1)

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        ks = counts_per_segment(self.density, segments)
        return kernels.sampled_topk(x, segments, ks, self.density, self.sample_ratio, keys, lower=LOWER)

    def padded(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Padded, Tensor] | None:
        ks = counts_per_segment(self.density, segments)
        chosen = kernels.padded_topk(x, segments, ks, self.density, self.sample_ratio, keys, lower=LOWER)
        return None if chosen is None else (chosen, ks)

    def omega(self, n: int) -> float:
        return 1 - math.ceil(LOWER * self.max_count(n) - 1e-9) / n if n else 0.0
