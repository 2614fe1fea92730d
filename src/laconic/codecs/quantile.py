"""Quantile: values in bins of equal count, each sent as the mean of its bin.

Quantile-bucket quantisation of SketchML (Jiang et al. 2018, SIGMOD). Differences: bins come from all
values, not a sketch; a bin's value is the mean of its members, not the middle of its interval; no bin has
both signs.
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
from laconic.kernels.codebook.shapes import quantile_shape

MOST = 1 << 16


@dataclass(frozen=True, repr=False)
class Quantile(Codec):
    """The n sorted values of a tensor are cut into B = min(bins, n) bins.

    Negative and other values get bins in proportion to their number.

    Wire: mean of each bin float32 (B,), ascending; then the bin of each element in ceil(log2 B) bits: 4 B +
    ceil(n ceil(log2 B) / 8) bytes. Up to `bins` elements are exact. Error: a bin of m entries of one sign
    loses at most (1 - 1/m) of its sum of squares, and rounding the number of bins per sign at most doubles a
    bin's size: omega = 1 - 1/m with m = ceil(2 n / B).

    >>> import torch
    >>> codec = Quantile(bins=2)
    >>> codec.decode(codec.encode(torch.tensor([4.0, -1.0, 2.0, -2.0])), 4).tolist()
    [3.0, -1.5, 3.0, -1.5]
    """

    bins: int = 256

    unbiased: ClassVar[bool] = False
    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Jiang et al. 2018, SIGMOD"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "ccchengff/SketchML"
    examples: ClassVar[tuple[str, ...]] = (
        "quantile()",
        "quantile(bins=24)",
        "quantile(bins=2)",
        "sparse(topk(density=0.05), values=quantile(bins=16), indices=fine_delta())",
    )

    def __post_init__(self) -> None:
        arguments.whole("quantile: bins", self.bins, 2, MOST)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.quantile_encode(x, segments, self.bins)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.quantile_add_(wire, segments, out, self.bins, alpha)

    def nbytes(self, n: int) -> int:
        return kernels.codebook_nbytes(quantile_shape(n, self.bins), n)

    def omega(self, n: int) -> float:
        return 1 - 1 / -(-2 * n // self.bins) if n > self.bins else 0.0
