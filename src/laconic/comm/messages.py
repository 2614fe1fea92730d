"""Messages of a reduction, and the sum of all ranks' messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.partition import Parts
from laconic.core.codec import Codec
from laconic.core.deferred import translated
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn
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
    """Share times a gain, for damped feedback."""

    share: Sent
    gain: float

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.share.add_to_(x, alpha * self.gain)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.share.clear_(memory)


@dataclass(frozen=True)
class SentParts(Sent):
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
    """Entries as the others decode them: values float32 (K,) at indices int32 (K,) of their segments.

    counts int64 (s,): entries per segment. The indices are not checked.
    """

    segments: Segments
    indices: Tensor
    counts: Tensor
    values: Tensor
    known: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
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


def sent_by(rank: int) -> AbstractContextManager[None]:
    """Return a context in which each `WireError` names the rank whose message is read.

    >>> with sent_by(3):
    ...     raise WireError("too short")
    Traceback (most recent call last):
        ...
    laconic.core.errors.WireError: the message that rank 3 sent is damaged: too short
    """
    return translated(lambda error: _damaged(rank, error) if isinstance(error, WireError) else error)


def _damaged(rank: int, error: Exception) -> WireError:
    return WireError(f"the message that rank {rank} sent is damaged: {error}")


def encoded(x: Tensor, layout: Layout, codec: Codec, turn: Turn) -> Tensor:
    return codec.encode_layout(x, layout, turn) if layout.numel else x.new_empty(0, dtype=torch.uint8)


def encoded_parts(
    x: Tensor, parts: Parts, codec: Codec, turn: Turn
) -> tuple[list[Tensor], SentMessage | None]:
    """Return each part's message, and all in one if the codec concatenates."""
    if not codec.concatenates:
        return [encoded(x, part, codec, turn) for part in parts.layouts], None
    wire = encoded(x, parts.together, codec, turn)
    wires = wire.split_with_sizes(_nbytes_of(codec, parts.ranges))
    return list(wires), SentMessage(codec, wire, parts.together.segments)


@lru_cache(maxsize=512)
def _nbytes_of(codec: Codec, ranges: tuple[Segments, ...]) -> list[int]:
    """Return the bytes of each message. Cached: do not modify."""
    return [codec.message_nbytes(segments) for segments in ranges]


def add_messages_(out: Tensor, messages: Iterable[tuple[int, SentMessage]], alpha: float) -> Tensor:
    """Add alpha times each (sender's rank, message) to `out`, in order. `WireError` names the sender."""
    for codec, group in groupby(messages, key=lambda message: message[1].codec):
        ranks, shares = zip(*group, strict=True)
        with translated(partial(_by_number, ranks)):
            codec.decode_messages_add_([(share.wire, share.segments) for share in shares], out, alpha)
    return out


def _by_number(ranks: Sequence[int], error: Exception) -> Exception:
    if not isinstance(error, WireError):
        return error
    number = 0 if len(ranks) == 1 else error.message
    return error if number is None else _damaged(ranks[number], error)


def combined(
    comm: Comm,
    message: Tensor,
    up: Sequence[int],
    down: Sequence[int],
    combine: Callable[[Tensor], Tensor],
) -> Tensor:
    """Combine all ranks' messages uint8 (m,) to one, equal on every rank; each rank combines one chunk.

    `up`: bytes of each rank's chunk of a message. `down`: bytes of each combined chunk. `combine` combines
    the chunks for this rank, uint8 (N, up[rank]). Raises `WireError` for a chunk of the wrong length.
    """
    chunks = comm.all_to_all(torch.split(message, list(up)))
    _check_nbytes(chunks, [up[comm.rank]] * comm.size)
    results = comm.all_gather(combine(torch.stack(chunks)))
    _check_nbytes(results, down)
    return torch.cat(results)


def _check_nbytes(messages: Sequence[Tensor], expected: Sequence[int]) -> None:
    for rank, (message, nbytes) in enumerate(zip(messages, expected, strict=True)):
        if message.numel() != nbytes:
            with sent_by(rank):
                raise WireError(f"expected {nbytes} bytes, got {message.numel()}")
