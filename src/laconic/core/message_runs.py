"""Messages that one launch decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.deferred import translated
from laconic.core.errors import WireError
from laconic.core.framing import consecutive
from laconic.core.layout import Segments, apart

Message = tuple[Tensor, Segments]


def add_runs_(
    codec: Codec, messages: Sequence[Message], add: Callable[[list[Tensor], Segments], object]
) -> None:
    """Call `add` with the wires of consecutive nonempty messages with equal segments.

    On a GPU, messages of different tensors become one if the codec concatenates. A `WireError` has the number
    of the message among all.
    """
    if codec.concatenates and not all(wire.is_cpu for wire, _ in messages):
        given = [message for message in messages if message[1].numel]
        if (every := _in_one(tuple([segments for _, segments in given]))) is not None:
            with translated(partial(_with_number, codec, messages)):
                for wire, segments in given:
                    codec.check_size(wire, segments)
                add([consecutive([wire for wire, _ in given])], every)
            return
    first = 0
    for segments, group in groupby(messages, key=lambda message: message[1]):
        wires = [wire for wire, _ in group]
        if segments.numel:
            with translated(partial(_counted_from, first)):
                add(wires, segments)
        first += len(wires)


@lru_cache(maxsize=512)
def _in_one(ranges: tuple[Segments, ...]) -> Segments | None:
    """Return the ranges of several messages, or None if they overlap."""
    if len(ranges) < 2 or not apart(ranges):
        return None
    every = [pair for segments in ranges for pair in segments]
    return Segments(tuple(start for start, _ in every), tuple(size for _, size in every))


def _with_number(codec: Codec, messages: Sequence[Message], error: Exception) -> Exception:
    """Return the first damaged message's error, found on the CPU."""
    if not isinstance(error, WireError):
        return error
    error.message = None
    for number, (wire, segments) in enumerate(messages):
        try:
            if segments.numel:
                out = torch.zeros(segments.end, dtype=torch.float32, device="cpu")
                codec.decode_segments_add_(wire.cpu(), segments, out)
        except WireError as found:
            found.message = number
            return found
    return error


def _counted_from(first: int, error: Exception) -> Exception:
    if isinstance(error, WireError) and error.message is not None:
        error.message += first
    return error
