"""Counter: a whole number that the ranks of a group share, and that each adds to when it likes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from torch.distributed import Store  # type: ignore[attr-defined]  # torch marks no re-export

from laconic.core.errors import PeerError


class Counter(ABC):
    """Begins at 0. No rank waits for another."""

    @abstractmethod
    def add(self, amount: int) -> int:
        """Add this much, at once and undivided; the number after that. 0 asks only."""


class SharedCounter(Counter):
    """One of threads of one process.

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
    """A key of torch's store: each call is one question to the process that holds it, and its answer.

    Raises `PeerError` where that process has gone.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    def add(self, amount: int) -> int:
        try:
            value: int = self._store.add(self._key, amount)
        except RuntimeError as error:
            raise PeerError(f"the store that counts has gone: {error}") from error
        return value
