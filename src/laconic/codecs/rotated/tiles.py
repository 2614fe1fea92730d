"""Base of codecs that send another codec's message of a transformed tensor."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn

ROUNDING = 2.0**-22  # of |x|


class TileCodec(Codec):
    """`codec` of y, where y is an orthonormal transform of each tile of x."""

    codec: Codec

    @property
    @abstractmethod
    def gain(self) -> int:
        """Bound on max |y| / max |x|."""

    @abstractmethod
    def transform(self, x: Tensor, sizes: Sequence[int], *, back: bool = False) -> Tensor:
        """Transform tensors of these sizes in flat x, float32 (n,); `back` reverses it."""

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
        return least, most / self.gain

    def at(self, step: int) -> Codec:
        return replace(self, codec=self.codec.at(step))  # type: ignore[type-var]

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return self.codec.encode_segments(self._transformed(x, segments), segments.packed, keys)

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        packed = Layout.of((entry.name, entry.shape) for entry in layout)
        return self.codec.encode_layout(self._transformed(x, layout.segments), packed, turn)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        packed = segments.packed
        y = torch.zeros(packed.numel, dtype=torch.float32, device=out.device)
        self.codec.decode_segments_add_(wire, packed, y)
        return segments.add_(out, self.transform(y, segments.sizes, back=True), alpha)

    def _transformed(self, x: Tensor, segments: Segments) -> Tensor:
        return self.transform(segments.joined.gathered(x), segments.sizes)

    def nbytes(self, n: int) -> int:
        return self.codec.nbytes(n)

    def message_nbytes(self, segments: Segments) -> int:
        return self.codec.message_nbytes(segments)

    def omega(self, n: int) -> float:
        inner = self.codec.omega(n)
        rounded = (math.sqrt(inner) + ROUNDING) ** 2
        return min(rounded, math.nextafter(1, 0)) if inner < 1 else rounded  # rounding keeps a contraction
