"""Sent: a rank's share of a reduction, as the other ranks decode it.

Feedback subtracts it from a residual, clears its entries, or adds it to a public copy, so that feedback
does not depend on the messages of a codec or reducer.
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
    """This rank's share as the others decode it. No method creates a dense temporary."""

    @abstractmethod
    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Add alpha * share to x, in place."""

    @abstractmethod
    def clear_(self, memory: Tensor) -> Tensor:
        """Set the sent entries of memory to zero."""

    def subtract_from_(self, x: Tensor) -> Tensor:
        return self.add_to_(x, -1.0)


@dataclass(frozen=True)
class SentMessage(Sent):
    """The share of a codec's message; nothing if it has no elements."""

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
    """A share times a gain, for damped feedback."""

    share: Sent
    gain: float

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.share.add_to_(x, alpha * self.gain)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.share.clear_(memory)


@dataclass(frozen=True)
class SentParts(Sent):
    """A share of several parts, for example one for each rank."""

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
    """Entries sent exactly: values float32 (K,) at indices int32 (K,) from their segment's start.

    counts int64 (s,): entries per segment. The indices are not checked. The residual is x with zeros at these
    entries.
    """

    segments: Segments
    indices: Tensor
    counts: Tensor
    values: Tensor
    known: Tensor | None = None  # the cached positions

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions int64 (K,) in the flat buffer."""
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
