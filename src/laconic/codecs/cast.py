"""Cast: every element as a float of 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.elementwise import Elementwise
from laconic.codecs.framing import as_bytes, as_numbers
from laconic.core import arguments
from laconic.core.codec import check_input, check_wire

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 1 << 16  # elements
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # half the distance between 1 and the next number


@dataclass(frozen=True, repr=False)
class Cast(Elementwise):
    """Wire: `dtype` (n,), little-endian: 2 n bytes. Rounded to nearest, ties to even; not random, so biased.

        fp16  [sign | exponent 5 | mantissa 10]   normal from 6.1e-5 to 65504
        bf16  [sign | exponent 8 | mantissa 7]    normal from 1.2e-38 to 3.39e38

    Error: an element that is zero or in the normal range is off by at most u |x_i|, u = 2^-11 (fp16) or 2^-8
    (bf16): omega = u^2. Outside that range, `normal`, this does not hold. Below it an element is off by m =
    2^-25 (fp16) or 2^-134 (bf16) at most, and those up to m become zero; above it, and for infinities, the
    largest finite number is sent. No error exceeds its element: error feedback keeps the rest and sends it
    later. NaN stays.

    >>> Cast("fp16").decode(Cast("fp16").encode(torch.tensor([1.0, 0.1, 1e6])), 3).tolist()
    [1.0, 0.0999755859375, 65504.0]
    """

    dtype: str

    unbiased: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("cast(dtype='fp16')", "cast(dtype='bf16')")

    def __post_init__(self) -> None:
        arguments.choice("cast: dtype", self.dtype, tuple(HALVES))

    @property
    def itemsize(self) -> int:
        return 2

    @property
    def normal(self) -> tuple[float, float]:
        info = torch.finfo(HALVES[self.dtype])
        return info.smallest_normal, info.max

    def encode(self, x: Tensor, key: int = 0) -> Tensor:
        check_input(x, key)
        half = HALVES[self.dtype]
        most = torch.finfo(half).max
        wire = torch.empty_like(x, dtype=half)
        for part, to in zip(blocks(x), blocks(wire), strict=True):
            to.copy_(part.clamp(-most, most))
        return as_bytes(wire)

    def decode_add_(self, wire: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        check_wire(self, wire, self.nbytes(out.numel()))
        values = as_numbers(wire, HALVES[self.dtype])
        for part, to in zip(blocks(values), blocks(out), strict=True):
            to.add_(part.to(torch.float32), alpha=alpha)
        return out

    def omega(self, n: int) -> float:
        return UNIT[self.dtype] ** 2


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    """x (n,) in parts that stay in the cache while they are converted; whole where not on the CPU."""
    return torch.split(x, BLOCK) if x.is_cpu and x.numel() > BLOCK else (x,)
