"""Bytes kept for backward, dense and as they are, by what keeps them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

Watch: Any = reductions.StorageWeakRef  # tells whether a storage lives, and keeps its address from others


class Ledger:
    """Counts each storage once, as memory does."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self._dense: dict[int, Any] = {}
        self._exact: dict[int, Any] = {}

    def add(self, label: str, saved: Tensor, kept: int | None) -> None:
        """A saved tensor, and the bytes that stand for it; None where it is itself."""
        row = self.rows.setdefault(label, [0, 0])
        row[0] += _once(saved, self._dense)
        row[1] += _once(saved, self._exact) if kept is None else kept

    def settle(self, label: str, nbytes: int) -> None:
        """Bytes of what was decided later."""
        self.rows.setdefault(label, [0, 0])[1] += nbytes


def _once(saved: Tensor, seen: dict[int, Any]) -> int:
    """Bytes of the storage, or 0 if it was counted and still lives."""
    storage = saved.untyped_storage()
    weak = Watch(storage)
    if weak.cdata in seen and not seen[weak.cdata].expired():
        return 0
    seen[weak.cdata] = weak  # while this is held, no other storage has the address
    return storage.nbytes()
