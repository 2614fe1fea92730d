"""Fused: codecs of fixed size whose kernels write, and read, a message of many tensors in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from laconic.core.codec import Codec, check_input, check_wire
from laconic.core.layout import Segments


class Fused(Codec):
    """A message is the tensors' wires one after the other, without lengths; a wire is a message of one."""

    @property
    def fixed_size(self) -> bool:
        return True

    @abstractmethod
    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        """One message uint8 (m,) of these ranges of flat x; `keys` has one key a segment."""

    @abstractmethod
    def decode_segments_add_(
        self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0
    ) -> Tensor:
        """out[segment] += alpha * decoded, for each segment of a message, in place."""

    def encode(self, x: Tensor, key: int = 0) -> Tensor:
        check_input(x, key)
        return self.encode_segments(x, Segments.whole(x.numel()), (key,))

    def decode_add_(self, wire: Tensor, out: Tensor, alpha: float = 1.0) -> Tensor:
        return self.decode_segments_add_(wire, Segments.whole(out.numel()), out, alpha)

    def clear_(self, wire: Tensor, memory: Tensor) -> Tensor:
        return self.clear_segments_(wire, Segments.whole(memory.numel()), memory)

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        check_wire(self, wire, self.message_nbytes(segments))
        return segments.zero_(memory)
