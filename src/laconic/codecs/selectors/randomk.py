"""RandomK: random entries, drawn from a key that is sent instead of them."""

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
class RandomK(DensitySelector):
    """k = ceil(density * n) distinct positions, uniformly distributed and independent of x.

    They follow from (key, n); a wire has the 8-byte key. Values are unscaled: biased, for error feedback
    (Stich et al. 2018, arXiv:1809.07599). Error: E|x - x_S|^2 = (1 - k/n) |x|^2.

    >>> import torch
    >>> RandomK(density=0.5).select(torch.zeros(6), key=7).numel()
    3
    """

    replayable: ClassVar[bool] = True
    paper: ClassVar[str] = "Stich et al. 2018, arXiv:1809.07599"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("randomk(density=0.01)", "randomk(density=0.3)")

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        ks = counts_per_segment(self.density, segments)
        indices, counts = kernels.random_indices(segments.sizes_tensor, ks, keys)
        return indices.to(x.device), counts
