"""Layout of a message of levels, and how blocks are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from laconic.core import arguments, deferred
from laconic.core.layout import Segments
from laconic.kernels import checks
from laconic.kernels.bitpack import packed_nbytes, ternary_nbytes

NORMS = ("max", "l2", "mean")
LONGEST = 1 << 31
MOST = {"uniform": 32767, "powers": 127}  # a code has 16 bits; 2^-126 is the least normal float


@dataclass(frozen=True)
class Form:
    """Options of a message. Raises `ValueError` for impossible ones."""

    levels: int
    block: int = 0
    grid: str = "uniform"
    packing: str = "bits"

    def __post_init__(self) -> None:
        arguments.choice("grid", self.grid, tuple(MOST))
        arguments.whole("levels", self.levels, 1, MOST[self.grid])
        arguments.whole("block", self.block, 0, LONGEST, "0 makes a whole tensor one block")
        if self.packing not in ("bits", "base3") or (self.packing == "base3" and self.levels != 1):
            raise ValueError(f"packing must be 'bits', or 'base3' with levels=1, got {self.packing!r}")

    @property
    def powers(self) -> bool:
        return self.grid == "powers"

    @property
    def base3(self) -> bool:
        return self.packing == "base3"

    @property
    def bits(self) -> int:
        return 1 + self.levels.bit_length()

    def blocks_in(self, n: int) -> int:
        return min(n, 1) if self.block == 0 else -(-n // self.block)

    def codes_nbytes(self, n: int) -> int:
        return ternary_nbytes(n) if self.base3 else packed_nbytes(n, self.bits)

    def blocks(self, segments: Segments) -> int:
        return _blocks(self, segments)

    def message_nbytes(self, segments: Segments) -> int:
        return _message_nbytes(self, segments)


@lru_cache(maxsize=512)
def _blocks(form: Form, segments: Segments) -> int:
    return sum(form.blocks_in(n) for n in segments.sizes)


@lru_cache(maxsize=512)
def _message_nbytes(form: Form, segments: Segments) -> int:
    return sum(4 * form.blocks_in(n) + form.codes_nbytes(n) for n in segments.sizes)


@dataclass(frozen=True)
class Measure:
    """Scale of each block, and the floor below which an element becomes 0.

    `unsigned`: scales and floors are known to be nonnegative.
    """

    norm: str = "max"
    clip: float = 0.0
    scales: Tensor | None = None
    floors: Tensor | None = None
    unsigned: bool = False

    def __post_init__(self) -> None:
        arguments.choice("norm", self.norm, NORMS)
        if not 0 <= self.clip < math.inf or (self.clip and self.norm != "max"):
            raise ValueError(
                f"clip must be a number of standard deviations that norm='max' is limited to, or 0, "
                f"got {self.clip} with norm={self.norm!r}"
            )

    @property
    def number(self) -> int:
        return NORMS.index(self.norm)

    def check(self, blocks: int) -> None:
        for name, values in (("scales", self.scales), ("floors", self.floors)):
            if values is None:
                continue
            checks.flat(name, values)
            if values.numel() != blocks:
                raise ValueError(f"one of {name} a block is needed ({blocks}), got {values.numel()}")
            if not self.unsigned:
                negative = (values < 0).any().to(torch.int32).view(1)
                deferred.check(negative, partial(_negative, name, values))


def _negative(name: str, values: Tensor, _: int) -> ValueError:
    return ValueError(f"{name} must not be negative, got {float(values.min())}")
