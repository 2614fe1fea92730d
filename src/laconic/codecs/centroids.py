"""Centroids: values in bins of equal width around their mean, each sent as the mean of its bin.

The values of SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706) in 2 bits, with bins as in PrimeIntellect's and
Templar's code: 2^bits bins over six standard deviations. Here the mean is an edge of a bin, not its middle,
which bounds the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.spec import Status
from laconic.core.tensor_codec import TensorCodec


@dataclass(frozen=True, repr=False)
class Centroids(TensorCodec):
    """For a tensor's mean m and standard deviation s, w = range * s / 2^bits and b = floor((x - m) / w):

        bin = b, or the first or the last where it is beyond 2^(bits-1);   value = mean of the bin's members

    Wire: mean of each bin float32 (2^bits,), 0 if empty; then bins in `bits` bits: 4 * 2^bits + ceil(n bits /
    8) bytes. Up to 2^bits elements are exact, in 4 n bytes. Error: a bin of p members on one side of m loses
    at most 1 - 1/p of the sum of (x - m)^2, and both sides have members: omega = 1 - 1/(n - 1). NaN and Inf
    in more than 2^bits elements raise `NonFiniteError`.

    >>> codec = Centroids(bits=2)
    >>> wire = codec.encode(torch.tensor([1.0, -1.0, 3.0, -3.0, 1.0, -1.0]))
    >>> wire.numel(), codec.decode(wire, 6).tolist()
    (18, [1.0, -1.0, 3.0, -3.0, 1.0, -1.0])
    """

    bits: int = 2
    range: float = 6.0

    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Sarfi et al. 2025, arXiv:2508.15706"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "centroids()",
        "centroids(bits=4)",
        "sparse(chunked_topk(density=0.05, chunk=256), values=centroids(), indices=golomb())",
    )

    def __post_init__(self) -> None:
        arguments.whole("centroids: bits", self.bits, 1, 8)
        arguments.number("centroids: range", self.range, above=0)

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        if self._few(x.numel()):
            return as_bytes(x.clone())
        half = 1 << self.bits - 1
        values = x.double()
        mean = values.mean()
        if not bool(mean.isfinite()):  # a sum of float32 stays in float64's range
            raise NonFiniteError("a mean cannot hold NaN or Inf: skip such a step, as `compress` does")
        centred = values - mean
        width = self.range * centred.square().mean().sqrt() / (2 * half)
        width = torch.where(width > 0, width, torch.ones_like(width))
        codes = (centred / width).floor_().clamp_(-half, half - 1).add_(half).long()
        sums = values.new_zeros(2 * half).index_add_(0, codes, values)
        means = sums / torch.bincount(codes, minlength=2 * half).clamp_(min=1)
        return torch.cat([as_bytes(means.float()), kernels.pack_bits(codes.int(), self.bits)])

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        if self._few(n):
            return as_numbers(wire, torch.float32)
        book = 4 << self.bits
        means = as_numbers(wire[:book], torch.float32)
        if not bool(means.isfinite().all()):
            raise WireError(f"{self!r}: the mean of a bin is NaN or Inf")
        return means[kernels.unpack_bits(wire[book:], self.bits, n).long()]

    def nbytes(self, n: int) -> int:
        return 4 * n if self._few(n) else (4 << self.bits) + kernels.packed_nbytes(n, self.bits)

    def omega(self, n: int) -> float:
        return 0.0 if self._few(n) else 1 - 1 / (n - 1)

    def _few(self, n: int) -> bool:
        return n <= 1 << self.bits
