"""DCT: another codec applied to the frequencies of a tensor's tiles instead of its elements.

The cosine transform of DeMo (Peng, Quesnelle, Kingma 2024, arXiv:2411.19870): where momentum is smooth over a
tile, few coefficients hold most of it. It is orthonormal, so the error is that of the inner codec. Theirs
cuts a matrix into tiles; here a tile is a run of the flat tensor, folded, as wires know no shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.joined import add_joined_
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.kernels.squares import by_squares

AT_ONCE = 1 << 20  # elements held in float64 at a time
TILES = (2, 4, 8, 16, 32, 64, 128, 256)  # sides
ROUNDING = 2.0**-22  # of |x|, by float32 on the way there and back


@dataclass(frozen=True, repr=False)
class DCT(Codec):
    """Y = D X D' of each tile X (t, t) of t^2 consecutive elements, t = `tile`; `codec` sends Y.

        D[k, j] = sqrt((2 - [k = 0]) / t) cos(pi k (2 j + 1) / (2 t))

    The rest of a tensor is cut in tiles of half the side, and so on; up to three last elements stay
    unchanged. Products are in float64, so that machines agree on nearly all bits of float32; ranks whose
    machines multiply matrices differently may still differ in a last bit. A transform takes about 20 ns per
    element and core: one to encode, and one for each decoded message.

    Wire: that of `codec` for as many elements. Error: omega of `codec`, up to rounding. Sums beyond the
    largest float32 are cut off, so elements must be about `tile` times smaller than that.

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
    def unbiased(self) -> bool:
        return self.codec.unbiased

    @property
    def needs_feedback(self) -> bool:
        return self.codec.needs_feedback

    @property
    def fixed_size(self) -> bool:
        return self.codec.fixed_size

    @property
    def normal(self) -> tuple[float, float]:
        least, most = self.codec.normal
        return least, most / self.tile

    def at(self, step: int) -> Codec:
        return replace(self, codec=self.codec.at(step))

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return self.codec.encode_segments(self._frequencies(x, segments), segments.packed, keys)

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        packed = Layout.of((entry.name, entry.shape) for entry in layout)
        return self.codec.encode_layout(self._frequencies(x, layout.segments), packed, turn)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        packed = segments.packed
        y = torch.zeros(packed.numel, dtype=torch.float32, device=out.device)
        self.codec.decode_segments_add_(wire, packed, y)
        values = by_tiles(y, self.tile, lambda d, tiles: d.T @ tiles @ d, segments.sizes)
        return add_joined_(out, segments, values, alpha)

    def _frequencies(self, x: Tensor, segments: Segments) -> Tensor:
        """Return coefficients of these ranges of flat x, one range after the other."""
        flat = segments.joined.gathered(x)
        return by_tiles(flat, self.tile, lambda d, tiles: d @ tiles @ d.T, segments.sizes)

    def nbytes(self, n: int) -> int:
        return self.codec.nbytes(n)

    def message_nbytes(self, segments: Segments) -> int:
        return self.codec.message_nbytes(segments)

    def omega(self, n: int) -> float:
        inner = self.codec.omega(n)
        rounded = (math.sqrt(inner) + ROUNDING) ** 2
        return min(rounded, math.nextafter(1, 0)) if inner < 1 else rounded  # of a contraction, one is left


def by_tiles(
    x: Tensor, tile: int, transform: Callable[[Tensor, Tensor], Tensor], sizes: Sequence[int] | None = None
) -> Tensor:
    """Apply `transform`, of a matrix (t, t) and tiles (m, t, t), to flat x (n,): float32 (n,).

    `sizes`: of the tensors in x, if there are several.
    """

    def of_side(side: int, tiles: Tensor) -> Tensor:
        return transform(_on(side, x.device), tiles)

    return by_squares(x, sizes or (x.numel(),), tile, AT_ONCE, of_side)


@lru_cache(maxsize=64)
def _on(t: int, device: torch.device) -> Tensor:
    """Return `cosines` on a device. Shared between calls: do not modify."""
    return cosines(t).to(device)


@lru_cache(maxsize=16)
def cosines(t: int) -> Tensor:
    """Return D, float64 (t, t), orthonormal. Shared between calls: do not modify."""
    k, j = (
        torch.arange(t, dtype=torch.int64, device="cpu").double().view(-1, 1),
        torch.arange(t, dtype=torch.int64, device="cpu").double(),
    )
    d = torch.cos(math.pi * k * (2 * j + 1) / (2 * t)) * math.sqrt(2 / t)
    d[0] /= math.sqrt(2)
    return d
