"""Dense: every element as it is. The codec that loses nothing and saves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.elementwise import Elementwise
from laconic.codecs.framing import as_bytes, as_numbers
from laconic.core.codec import check_input, check_wire


@dataclass(frozen=True, repr=False)
class Dense(Elementwise):
    """Wire: float32 (n,), little-endian: 4 n bytes. Error: none.

    >>> wire = Dense().encode(torch.tensor([1.0, -2.0]))
    >>> wire.numel(), Dense().decode(wire, 2).tolist()
    (8, [1.0, -2.0])
    """

    unbiased: ClassVar[bool] = True

    @property
    def itemsize(self) -> int:
        return 4

    def encode(self, x: Tensor, key: int = 0) -> Tensor:
        check_input(x, key)
        return as_bytes(x.clone())

    def decode_add_(self, wire: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        check_wire(self, wire, self.nbytes(out.numel()))
        return out.add_(as_numbers(wire, torch.float32), alpha=alpha)

    def omega(self, n: int) -> float:
        return 0.0

    def absolute_error(self, n: int) -> float:
        return 0.0
