"""Sent: a rank's own share of a reduction, as the other ranks decode it.

Feedback subtracts it from what it holds, clears it, or adds it to a public copy, so that no memory knows how
a codec or a reducer writes its messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.kernels import dispatch


class Sent(ABC):
    """This rank's share as the others decode it. No method makes a dense temporary."""

    @abstractmethod
    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        """x += alpha * share, in place."""

    @abstractmethod
    def clear_(self, memory: Tensor) -> Tensor:
        """Set to zero the entries of memory that were sent."""

    def subtract_from_(self, x: Tensor) -> Tensor:
        """x -= share, in place."""
        return self.add_to_(x, -1.0)


@dataclass(frozen=True)
class SentMessage(Sent):
    """A share that is a codec's message; of no elements, whatever the message is."""

    codec: Codec
    wire: Tensor
    segments: Segments

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        if self.segments.numel:
            self.codec.decode_segments_add_(self.wire, self.segments, x, alpha)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        if self.segments.numel:
            self.codec.clear_segments_(self.wire, self.segments, memory)
        return memory


@dataclass(frozen=True)
class ScaledShare(Sent):
    """A share times a gain, as damped feedback needs it."""

    share: Sent
    gain: float

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.share.add_to_(x, alpha * self.gain)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.share.clear_(memory)


@dataclass(frozen=True)
class SentParts(Sent):
    """A share in parts, each a share of its own: one part to each rank, for example."""

    parts: tuple[Sent, ...]

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        for part in self.parts:
            part.add_to_(x, alpha)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        for part in self.parts:
            part.clear_(memory)
        return memory


@dataclass(frozen=True)
class SentEntries(Sent):
    """Entries sent as they are: values float32 (K,) at indices int32 (K,) from their segment's start.

    counts int64 (s,): how many belong to each segment. The indices are not checked. What stays behind is x
    with these entries at zero.
    """

    segments: Segments
    indices: Tensor
    counts: Tensor
    values: Tensor
    known: Tensor | None = None  # the positions, if they were needed before

    @cached_property
    def positions(self) -> Tensor:
        """Positions int64 (K,) in the flat buffer."""
        if self.known is not None:
            return self.known
        return kernels.flat_positions(self.indices, self.counts, self.segments)

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        if dispatch.native(x) is None:
            if abs(alpha) == 1:
                return x.index_add_(0, self.positions, self.values, alpha=alpha)
            return x.index_add_(0, self.positions, self.values * alpha)
        return kernels.scatter_add_(x, self.segments, self.indices, self.counts, self.values, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        if dispatch.native(memory) is None:
            return memory.index_fill_(0, self.positions, 0.0)
        return kernels.scatter_zero_(memory, self.segments, self.indices, self.counts)
