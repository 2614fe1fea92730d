"""What is worked out once for each layout: a bucket's comes again at every step, as the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from laconic.core.layout import Layout

T = TypeVar("T")


class PerLayout(Generic[T]):
    """`make(layout)`, made when a layout first comes, and kept with it: so its id stays its own.

    >>> halves = PerLayout(lambda layout: layout.numel // 2)
    >>> halves(Layout.of([("a", (4, 3))]))
    6
    """

    def __init__(self, make: Callable[[Layout], T]) -> None:
        self._make = make
        self._made: dict[int, tuple[Layout, T]] = {}

    def __call__(self, layout: Layout) -> T:
        known = self._made.get(id(layout))
        if known is None:
            known = self._made[id(layout)] = layout, self._make(layout)
        return known[1]

    def clear(self) -> None:
        """Make everything anew."""
        self._made.clear()
