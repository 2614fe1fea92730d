"""Logquant: each value as a power of a base times the largest, for one relative precision of all.

Yang et al. 2021, arXiv:2112.04291 ("FastSGD"). Reconstruction from the abstract, where 1 / |v| is mapped to
an integer logarithm; here s / |v|, so that no value falls outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.framing import CPU
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.codebook.shapes import powers_shape

MOST = 255


@dataclass(frozen=True, repr=False)
class Logquant(Codec):
    """Quantiser with s = max |x|: q = round(log_base(s / |x|)); decoded as sign(x) * s * base^-q.

    Wire: s float32 (1,); then per element [sign | level], level = levels - q in bit_length(levels) bits for q
    < levels, else 0 without a sign: 4 + ceil(n (1 + bit_length(levels)) / 8) bytes. Error: a sent entry has
    an error of at most r |x_i|, r = sqrt(base) - 1, and the largest none. At most n - 1 entries are dropped,
    each below s base^-(levels - 1/2). With d = (n - 1) base^-(2 levels - 1): omega = max(r^2, d / (1 + d)).

    >>> codec = Logquant(levels=3)
    >>> codec.decode(codec.encode(torch.tensor([8.0, -3.0, 2.0, 1.0])), 4).tolist()
    [8.0, -4.0, 2.0, 0.0]
    """

    base: float = 2.0
    levels: int = 15

    unbiased: ClassVar[bool] = False
    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Yang et al. 2021, arXiv:2112.04291"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "logquant()",
        "logquant(base=1.2, levels=63)",
        "logquant(base=3.5, levels=1)",
        "sparse(above_share(share=0.1), values=logquant(levels=4), indices=fine_delta())",
    )

    def __post_init__(self) -> None:
        bounded = "there its error is bounded"
        arguments.number("logquant: base", self.base, least=1.001, below=4, hint=bounded)
        arguments.whole("logquant: levels", self.levels, 1, MOST)

    @property
    def least_share(self) -> float:
        """Smallest share of max |x| that is sent: base^-(levels - 1/2), as float32."""
        return float(powers_of(self.base, self.levels, 0.5)[0])

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.powers_encode(x, segments, powers_of(self.base, self.levels, 0.5, x.device))

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        powers = powers_of(self.base, self.levels, 0.0, out.device)
        return kernels.powers_add_(wire, segments, out, powers, alpha)

    def nbytes(self, n: int) -> int:
        return kernels.codebook_nbytes(powers_shape(n, self.levels), n)

    def omega(self, n: int) -> float:
        kept = (math.sqrt(self.base) - 1) ** 2
        dropped = max(n - 1, 0) * self.base ** (1 - 2 * self.levels)
        return max(kept, dropped / (1 + dropped)) * (1 + 1e-6)  # the tables are rounded to float32


@lru_cache(maxsize=64)
def powers_of(base: float, levels: int, shift: float, device: torch.device = CPU) -> Tensor:
    """Return base^-(q + shift) for q = levels - 1 down to 0, float32 (levels,), rounded once from float64."""
    powers = [base ** -(q + shift) for q in reversed(range(levels))]
    return torch.tensor(powers, dtype=torch.float64, device="cpu").float().to(device)
