"""Rotated: another codec applied to a tensor whose blocks are rotated at random.

A Hadamard matrix after random signs spreads the largest element over its block, so that a quantiser needs few
bits (Suresh et al. 2017, arXiv:1611.00429).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.rotated.tiles import TileCodec
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.spec import Status
from laconic.core.turn import mix
from laconic.kernels.squares import by_squares

AT_ONCE = 1 << 16  # elements in float64 at a time, for the cache
BLOCKS = (4, 16, 64, 256, 1024, 4096)  # powers of 4: a block is a square


@dataclass(frozen=True, repr=False)
class Rotated(TileCodec):
    """y = H S x / sqrt(b) of each b = `block` consecutive elements; `codec` sends y, and x = S H y / sqrt(b).

        H = [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]], (b, b);   S = diag(s), s_i = +-1

    The signs s are the same in every block, step and process. The rest of a tensor is cut in blocks of a
    quarter, and so on; up to three last elements stay unchanged. Products, of numbers on a grid, are exact in
    float64: every machine sends the same bits.

    Wire: that of `codec`. Error: omega of `codec`, up to rounding. Elements must be sqrt(b) times below the
    largest float32: larger sums are clipped.

    >>> import torch
    >>> from laconic.core.spec import parse
    >>> codec = parse("rotated(sign(), block=16)")  # one sign an element, and a spike comes back exactly
    >>> codec.decode(codec.encode(torch.tensor([8.0] + 15 * [0.0])), 16).tolist()[:3]
    [8.0, 0.0, 0.0]
    """

    codec: Codec
    block: int = 1024

    paper: ClassVar[str] = "Suresh et al. 2017, arXiv:1611.00429"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = (
        "rotated(minmax(bits=4))",
        "rotated(minmax(bits=2, rounding='stochastic'), block=64)",
    )

    def __post_init__(self) -> None:
        arguments.piece("rotated: codec", self.codec, Codec, "minmax(bits=4)")
        arguments.choice("rotated: block", self.block, BLOCKS)

    @property
    def gain(self) -> int:
        return math.isqrt(self.block)

    def transform(self, x: Tensor, sizes: Sequence[int], *, back: bool = False) -> Tensor:
        return by_blocks(x, self.block, sizes, back=back)


def by_blocks(x: Tensor, block: int, sizes: Sequence[int] | None = None, *, back: bool = False) -> Tensor:
    """Rotate each block of flat x (n,), or of tensors of these sizes; `back` reverses it."""

    def rotated(side: int, squares: Tensor) -> Tensor:
        h, s = _constants(side, x.device)
        exact = on_grid(squares)
        made = h @ exact @ h * s if back else h @ (exact * s) @ h
        return made.mul_(1 / side)

    return by_squares(x, sizes or (x.numel(),), math.isqrt(block), AT_ONCE, rotated)


@lru_cache(maxsize=64)
def _constants(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached: do not modify."""
    return hadamard(side).to(device), signs(side * side).to(device).view(side, side)


def on_grid(squares: Tensor) -> Tensor:
    """Round float64 (m, t, t) to 40 bits below the largest |x| of each square.

    Sums of 4096 such numbers are exact, in any order of addition.
    """
    largest = torch.linalg.vector_norm(squares, torch.inf, dim=(1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent.long()
    shift = 1.5 * (exponent + 12 + 1023 << 52).view(torch.float64)  # its last bit is 2^(exponent - 40)
    return squares + shift - shift


@lru_cache(maxsize=16)
def hadamard(side: int) -> Tensor:
    """Return H of entries 1 and -1, float64 (side, side). Cached: do not modify.

    >>> hadamard(4).int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(h) < side:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu"), h)
    return h


@lru_cache(maxsize=16)
def signs(block: int) -> Tensor:
    """Return s, float64 (block,), of +-1. Cached: do not modify."""
    return torch.tensor(
        [1.0 - 2.0 * (mix(block, i) & 1) for i in range(block)], dtype=torch.float64, device="cpu"
    )
