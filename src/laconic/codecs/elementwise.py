"""Elementwise: codecs that write each element alone, in a fixed number of bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core.codec import Codec, check_wire
from laconic.core.layout import Segments


class Elementwise(Codec):
    """Wire of n elements: n * itemsize bytes, in order. A message of many tensors is one long wire.

    So a message costs one call for each run of tensors that lie one after the other, not one for each tensor.
    """

    fixed_size: ClassVar[bool] = True

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of one element."""

    def nbytes(self, n: int) -> int:
        return self.itemsize * n

    def clear_(self, wire: Tensor, memory: Tensor) -> Tensor:
        check_wire(self, wire, self.nbytes(memory.numel()))
        return memory.zero_()

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        views = segments.joined.views(x)
        return self.encode(views[0] if len(views) == 1 else torch.cat([x[:0], *views]))

    def decode_segments_add_(
        self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0
    ) -> Tensor:
        check_wire(self, wire, self.nbytes(segments.numel))
        parts = segments.joined
        wires = torch.split(wire, [self.nbytes(size) for size in parts.sizes]) if len(parts) else ()
        for part, view in zip(wires, parts.views(out), strict=True):
            self.decode_add_(part, view, alpha)
        return out

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        check_wire(self, wire, self.nbytes(segments.numel))
        return segments.zero_(memory)
