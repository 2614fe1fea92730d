"""Shares that were sent this turn and leave the memory when the next one begins.

A step can still be void after a bucket was sent: another rank may find Inf in a later bucket. So nothing is
subtracted before the turn is over. Putting back is then exact, and costs nothing: the share is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from laconic.core.layout import Layout
from laconic.feedback.feedback import Share


class Pending:
    """Shares by layout, and what to do with each when it becomes final."""

    def __init__(self, finish: Callable[[Share, Layout], None]) -> None:
        self._finish = finish
        self._shares: dict[int, tuple[Share, Layout]] = {}

    def add(self, share: Share, layout: Layout) -> None:
        """Remember what was sent of these tensors."""
        self._shares[id(layout)] = (share, layout)

    def drop(self, layout: Layout) -> None:
        """Forget it: the step is void."""
        self._shares.pop(id(layout), None)

    def finish(self, layout: Layout) -> None:
        """Make the share of these tensors final, if there is one."""
        entry = self._shares.pop(id(layout), None)
        if entry is not None:
            self._finish(*entry)

    def finish_all(self) -> None:
        """Make every share final."""
        for share, layout in self._shares.values():
            self._finish(share, layout)
        self._shares.clear()
