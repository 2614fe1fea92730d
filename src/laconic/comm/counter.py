"""Counter: an integer that starts at 0, which the ranks of a group may increase at any time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from torch.distributed import Store  # type: ignore[attr-defined]

from laconic.core.errors import PeerError


class Counter(ABC):
    @abstractmethod
    def add(self, amount: int) -> int:
        """Add `amount` atomically and return the new value."""


class SharedCounter(Counter):
    """Counter for the threads of one process.

    >>> tickets = SharedCounter()
    >>> tickets.add(1), tickets.add(2), tickets.add(0)
    (1, 3, 3)
    """

    def __init__(self) -> None:
        self._lock, self._value = threading.Lock(), 0

    def add(self, amount: int) -> int:
        with self._lock:
            self._value += amount
            return self._value


class StoreCounter(Counter):
    """Key of torch's store: one round trip per call. Raises `PeerError` if the store's process has ended."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    def add(self, amount: int) -> int:
        try:
            value: int = self._store.add(self._key, amount)
        except RuntimeError as error:
            raise PeerError(f"the store of the counter is unavailable: {error}") from error
        return value
