"""Runs of consecutive messages of the same tensors, which one launch decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from torch import Tensor

from laconic.core.deferred import translated
from laconic.core.errors import WireError
from laconic.core.layout import Segments


def add_runs_(
    messages: Sequence[tuple[Tensor, Segments]], add: Callable[[list[Tensor], Segments], object]
) -> None:
    """Call `add` with the wires of consecutive nonempty messages with equal segments.

    A `WireError` has the number of the message among all.
    """
    first = 0
    for segments, group in groupby(messages, key=lambda message: message[1]):
        wires = [wire for wire, _ in group]
        if segments.numel:
            with translated(partial(_counted_from, first)):
                add(wires, segments)
        first += len(wires)


def _counted_from(first: int, error: Exception) -> Exception:
    if isinstance(error, WireError) and error.message is not None:
        error.message += first
    return error
