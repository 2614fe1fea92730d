"""Results computed once per layout: a bucket has the same layout object at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from laconic.core.layout import Layout

T = TypeVar("T")


class PerLayout(Generic[T]):
    """Calls `make(layout)` for a new layout, and keeps the result together with the layout.

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

    def refresh(self, make: Callable[[Layout, T], T]) -> None:
        """Replace each result by `make(layout, result)`."""
        self._made = {key: (layout, make(layout, known)) for key, (layout, known) in self._made.items()}

    def clear(self) -> None:
        """Forget all results."""
        self._made.clear()
