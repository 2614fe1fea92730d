"""Old values of a memory, until it is known whether the step counts.

In float32 (r + g) - g is not r, so a skipped step can only be undone with the old values. They are kept in
the gradient's own buffer if that is free until its mean is written at the end of the step, else in a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.layout import Layout, Segments

PIECE = 1 << 16  # elements that are copied and updated at a time, so that the copy stays in cache
Update = Callable[[Segments, slice], bool]  # of some ranges: those of these places in the layout


class OldValues:
    """Old values of the present step, by layout."""

    def __init__(self) -> None:
        self._held: dict[int, list[Old]] = {}

    def update_(
        self,
        layout: Layout,
        memories: Sequence[Tensor],
        update: Update,
        rooms: Sequence[Tensor | None],
        grad: Tensor,
    ) -> bool:
        """Update memories, each float32 (layout.segments.end,), and keep their old values.

        Args:
            update: Changes some ranges of the memories by `grad`; False if a new value is not finite.
            rooms: Buffers for the old values, new ones where None. The first may be `grad` itself, if its
                buffer is free once it is read.
            grad: float32, in the layout's coordinates.

        Returns:
            Whether all new values are finite. If not, the memories are as before, and of `grad` what is not
            finite is still there.
        """
        runs = layout.segments.merged
        self._held.pop(id(layout), None)  # of a step that ended with an error
        old = [
            Old(memory, torch.empty_like(memory) if room is None else room, runs)
            for memory, room in zip(memories, rooms, strict=True)
        ]
        if grad.is_cpu:
            finite = _by_pieces(layout.segments, old, update, grad)
        else:
            for each in old:
                each.save(runs)
            finite = update(layout.segments, slice(None))
            if not finite:
                for each in old:
                    each.restore(runs)
        if finite:
            self._held[id(layout)] = old
        return finite

    def restore(self, layout: Layout) -> None:
        """Put the old values back, and forget them."""
        for each in self._held.pop(id(layout), ()):
            each.restore(each.runs)

    def drop(self, layout: Layout) -> None:
        """Forget them: the step counts."""
        self._held.pop(id(layout), None)

    def clear(self) -> None:
        """Forget those of all layouts."""
        self._held.clear()


@dataclass(frozen=True)
class Old:
    """Old values of some ranges of one memory, in a buffer of the same coordinates."""

    memory: Tensor
    room: Tensor
    runs: Segments

    def save(self, runs: Segments) -> None:
        """Copy these ranges of the memory to the buffer."""
        copy_(self.room, self.memory, runs)

    def restore(self, runs: Segments) -> None:
        """Copy these ranges of the buffer to the memory."""
        copy_(self.memory, self.room, runs)


def _by_pieces(segments: Segments, old: Sequence[Old], update: Update, grad: Tensor) -> bool:
    """Save and update piece by piece; stop at one that is not finite, with all memories as before."""
    parked = old[0] if old[0].room is grad else None
    scratch = grad.new_empty(min(PIECE, segments.numel) if parked else 0)
    done: list[Segments] = []
    for piece, places in pieces(segments, PIECE):
        runs = piece.merged
        views = runs.views(old[0].memory) if parked else []
        saved = runs.packed.views(scratch) if parked else []
        for each in old:
            if each is parked:
                torch._foreach_copy_(saved, views)
            else:
                each.save(runs)
        finite = update(piece, places)
        for each in () if finite else old:
            if each is parked:
                torch._foreach_copy_(views, saved)
            else:
                each.restore(runs)
            for earlier in done:
                each.restore(earlier)
        if not finite:
            return False
        if parked:
            torch._foreach_copy_(runs.views(grad), saved)
        done.append(runs)
    return True


@lru_cache(maxsize=512)
def pieces(segments: Segments, most: int) -> tuple[tuple[Segments, slice], ...]:
    """Cut ranges into pieces of about `most` elements: some whole ranges, or a part of one.

    >>> [(piece.sizes, places) for piece, places in pieces(Segments((0, 3, 5), (3, 2, 9)), 5)]
    [((3, 2), slice(0, 2, None)), ((5,), slice(2, 3, None)), ((4,), slice(2, 3, None))]
    """
    found: list[tuple[Segments, slice]] = []
    first, total = 0, 0

    def close(end: int) -> None:
        if end > first:
            found.append((Segments(segments.starts[first:end], segments.sizes[first:end]), slice(first, end)))

    for i, (start, size) in enumerate(zip(segments.starts, segments.sizes, strict=True)):
        if total + size <= most:
            total += size
            continue
        close(i)
        first, total = i, size
        if size > most:
            for at in range(0, size, most):
                found.append((Segments((start + at,), (min(most, size - at),)), slice(i, i + 1)))
            first, total = i + 1, 0
    close(len(segments.sizes))
    return tuple(found)


def copy_(to: Tensor, source: Tensor, runs: Segments) -> None:
    """Copy these ranges of float32 (n,) from one buffer to the other."""
    if len(runs) == 1:
        runs.views(to)[0].copy_(runs.views(source)[0])
    elif runs.numel:
        torch._foreach_copy_(runs.views(to), runs.views(source))
