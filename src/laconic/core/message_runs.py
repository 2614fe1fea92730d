"""Runs of consecutive messages of the same tensors, which one launch decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

from torch import Tensor

from laconic.core.deferred import translated
from laconic.core.errors import WireError
from laconic.core.layout import Segments


def runs(messages: Sequence[tuple[Tensor, Segments]]) -> Iterator[tuple[int, list[Tensor], Segments]]:
    """Yield consecutive messages with equal segments: number of the first message, wires, segments.

    Messages without elements are omitted.
    """
    number = 0
    for segments, group in groupby(messages, key=lambda message: message[1]):
        wires = [wire for wire, _ in group]
        if segments.numel:
            yield number, wires, segments
        number += len(wires)


def counted_from(first: int) -> AbstractContextManager[None]:
    """Return a context that adds a number to the `message` of each `WireError`."""

    def translate(error: Exception) -> Exception:
        if isinstance(error, WireError) and error.message is not None:
            error.message += first
        return error

    return translated(translate)
