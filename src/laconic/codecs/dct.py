"""DCT: another codec applied to the frequencies of a tensor's tiles instead of its elements.

The cosine transform of DeMo (Peng, Quesnelle, Kingma 2024, arXiv:2411.19870). There tiles are cut from a
matrix; here, as wires have no shapes, from the flat tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.rotated.tiles import TileCodec
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.spec import Status
from laconic.kernels.squares import by_squares

AT_ONCE = 1 << 20  # elements in float64 at a time
TILES = (2, 4, 8, 16, 32, 64, 128, 256)  # sides


@dataclass(frozen=True, repr=False)
class DCT(TileCodec):
    """Y = D X D' of each tile X (t, t) of t^2 consecutive elements, t = `tile`; `codec` sends Y.

        D[k, j] = sqrt((2 - [k = 0]) / t) cos(pi k (2 j + 1) / (2 t))

    The rest of a tensor is cut in tiles of half the side, and so on; up to three last elements stay
    unchanged. Computed in float64; the last bit of float32 may depend on the machine.

    Wire: that of `codec`. Error: omega of `codec`, up to rounding. Elements must be `tile` times below the
    largest float32: larger sums are clipped.

    >>> from laconic.core.spec import parse
    >>> codec = parse("dct(sparse(topk(density=0.25)), tile=2)")
    >>> codec.decode(codec.encode(torch.full((4,), 3.0)), 4).tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    codec: Codec
    tile: int = 64

    paper: ClassVar[str] = "Peng et al. 2024, arXiv:2411.19870"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "dct(minmax(bits=8))",
        "dct(sparse(chunked_topk(density=0.05, chunk=256), indices=golomb()), tile=16)",
    )

    def __post_init__(self) -> None:
        arguments.piece("dct: codec", self.codec, Codec, "sparse(topk(density=0.01))")
        arguments.choice("dct: tile", self.tile, TILES)

    @property
    def gain(self) -> int:
        return self.tile

    def transform(self, x: Tensor, sizes: Sequence[int], *, back: bool = False) -> Tensor:
        if back:
            return by_tiles(x, self.tile, lambda d, tiles: d.T @ tiles @ d, sizes)
        return by_tiles(x, self.tile, lambda d, tiles: d @ tiles @ d.T, sizes)


def by_tiles(
    x: Tensor, tile: int, transform: Callable[[Tensor, Tensor], Tensor], sizes: Sequence[int] | None = None
) -> Tensor:
    """Apply `transform`, of a matrix (t, t) and tiles (m, t, t), to flat x (n,): float32 (n,).

    `sizes`: of the tensors in x.
    """

    def of_side(side: int, tiles: Tensor) -> Tensor:
        return transform(_on(side, x.device), tiles)

    return by_squares(x, sizes or (x.numel(),), tile, AT_ONCE, of_side)


@lru_cache(maxsize=64)
def _on(t: int, device: torch.device) -> Tensor:
    """Cached: do not modify."""
    return cosines(t).to(device)


@lru_cache(maxsize=16)
def cosines(t: int) -> Tensor:
    """Return D, float64 (t, t), orthonormal. Cached: do not modify."""
    k, j = (
        torch.arange(t, dtype=torch.int64, device="cpu").double().view(-1, 1),
        torch.arange(t, dtype=torch.int64, device="cpu").double(),
    )
    d = torch.cos(math.pi * k * (2 * j + 1) / (2 * t)) * math.sqrt(2 / t)
    d[0] /= math.sqrt(2)
    return d
