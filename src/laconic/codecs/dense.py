"""Dense: every element in float32, without loss or compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.layout import Segments
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Dense(Codec):
    """Wire: float32 (n,), little-endian: 4 n bytes. Error: none. A wire with NaN or Inf is refused.

    >>> wire = Dense().encode(torch.tensor([1.0, -2.0]))
    >>> wire.numel(), Dense().decode(wire, 2).tolist()
    (8, [1.0, -2.0])
    """

    status: ClassVar[Status] = "own"
    unbiased: ClassVar[bool] = True

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return as_bytes(torch.cat([x[:0], *segments.joined.views(x)]))

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        self.check_size(wire, segments)
        runs, values = segments.joined, as_numbers(wire, torch.float32)
        if not kernels.all_finite(values, runs.packed):
            raise WireError(f"{self!r}: a wire holds NaN or Inf; only finite numbers are sent")
        for view, part in zip(runs.views(out), runs.packed.views(values), strict=True):
            view.add_(part, alpha=alpha)
        return out

    def nbytes(self, n: int) -> int:
        return 4 * n

    def omega(self, n: int) -> float:
        return 0.0

    def absolute_error(self, n: int) -> float:
        return 0.0
