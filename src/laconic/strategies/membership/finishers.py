"""Finishers: ranks that wait in `finish()` for those that still have steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Place:
    generation: int
    steps: int


class Standstill:
    def __init__(self) -> None:
        self._begun: Mapping[int, int] = {}
        self._since = time.monotonic()

    def lasts_s(self, begun: Mapping[int, int]) -> float:
        if begun != self._begun:
            self._begun, self._since = begun, time.monotonic()
        return time.monotonic() - self._since


class Finishers:
    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.waits = False

    def announce(self, place: Place) -> None:
        self.waits = True
        self._store.set(f"finishing/{self._rank}", f"{place.generation} {place.steps}")

    def withdraw(self) -> None:
        """Clear this rank's entry. Deleting it would block readers."""
        if self.waits:
            self.waits = False
            self.forget()

    def forget(self) -> None:
        self._store.set(f"finishing/{self._rank}", "")

    def places(self, ranks: Iterable[int] | None = None) -> dict[int, Place]:
        found = {}
        for rank in range(self._size) if ranks is None else ranks:
            key = f"finishing/{rank}"
            if self._store.check([key]) and (entry := self._store.get(key).decode()):
                generation, steps = map(int, entry.split())
                found[rank] = Place(generation, steps)
        return found
