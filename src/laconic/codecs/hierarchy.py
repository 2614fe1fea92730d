"""Hierarchy: magnitudes in a few groups by size, each sent as the mean of its group.

Jiang et al. 2022, arXiv:2212.14760. Reconstruction from the abstract: groups of equal count, their means and
the wire are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.codebook.shapes import hierarchy_shape

MOST = 256


@dataclass(frozen=True, repr=False)
class Hierarchy(Codec):
    """The n sorted magnitudes of a tensor are cut into L = min(levels, n) groups of equal count.

    Wire: mean of each group float32 (L,), largest first; then per element [sign | group ceil(log2 L) bits]: 4
    L + ceil(n (1 + ceil(log2 L)) / 8) bytes. With one level it is `signmean()`, bit for bit.

    Error: a group of m entries loses at most 1 - 1/m of its sum of squares: omega = 1 - 1/m with m = ceil(n /
    L).

    >>> import torch
    >>> codec = Hierarchy(levels=2)
    >>> codec.decode(codec.encode(torch.tensor([4.0, -1.0, 2.0, 1.0])), 4).tolist()
    [3.0, -1.0, 3.0, 1.0]
    """

    levels: int = 4

    unbiased: ClassVar[bool] = False
    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Jiang et al. 2022, arXiv:2212.14760"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "hierarchy()",
        "hierarchy(levels=1)",
        "hierarchy(levels=5)",
        "sparse(topk(density=0.05), values=hierarchy(), indices=golomb())",
    )

    def __post_init__(self) -> None:
        arguments.whole("hierarchy: levels", self.levels, 1, MOST)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        if self.levels == 1:
            return kernels.sign_encode(x, segments, keys=keys)  # the same wire, with an equal mean
        return kernels.hierarchy_encode(x, segments, self.levels)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.hierarchy_add_(wire, segments, out, self.levels, alpha)

    def nbytes(self, n: int) -> int:
        return kernels.codebook_nbytes(hierarchy_shape(n, self.levels), n)

    def omega(self, n: int) -> float:
        return 1 - 1 / -(-n // min(self.levels, n)) if n else 0.0
