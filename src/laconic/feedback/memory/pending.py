"""What changes a memory when the next turn begins: shares that were sent in this one, and the like.

A step can still be skipped after a bucket was sent: another rank may find Inf in a later bucket. So nothing
is subtracted before the turn is over, and a skipped step only drops the share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from laconic.core.layout import Layout

T = TypeVar("T")


class Pending(Generic[T]):
    """Shares by layout, and what to do with each when it becomes final."""

    def __init__(self, finish: Callable[[T, Layout], None]) -> None:
        self._finish = finish
        self._step = -1  # of all the shares below
        self._shares: dict[int, tuple[T, Layout]] = {}

    def add(self, share: T, layout: Layout, step: int) -> None:
        """Remember what was sent of these tensors in this step."""
        self._step = step
        self._shares[id(layout)] = (share, layout)

    def drop(self, layout: Layout) -> None:
        """Forget it: the step is skipped."""
        self._shares.pop(id(layout), None)

    def clear(self) -> None:
        """Forget all shares."""
        self._shares.clear()

    def finish_before(self, step: int) -> None:
        """Make shares of earlier steps final: before a memory is used again, or moved to other buckets."""
        if self._step != step:
            self.finish_all()

    def finish_all(self) -> None:
        """Make every share final."""
        for share, layout in self._shares.values():
            self._finish(share, layout)
        self._shares.clear()
