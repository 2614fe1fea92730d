"""Bytes saved for backward by layer, dense and compressed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

StorageRef: Any = reductions.StorageWeakRef  # shows whether a storage is alive; its address is not reused


class Ledger:
    """Bytes by label. Each storage counts once."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self._dense: dict[int, Any] = {}
        self._exact: dict[int, Any] = {}

    def add(self, label: str, saved: Tensor, kept: int | None) -> None:
        """Add a saved tensor and its stored bytes, None if it is stored unchanged."""
        row = self.rows.setdefault(label, [0, 0])
        row[0] += _once(saved, self._dense)
        row[1] += _once(saved, self._exact) if kept is None else kept

    def resolve(self, label: str, nbytes: int) -> None:
        self.rows.setdefault(label, [0, 0])[1] += nbytes


def _once(saved: Tensor, seen: dict[int, Any]) -> int:
    """Return the bytes of the storage, or 0 if it was counted and is still alive."""
    storage = saved.untyped_storage()
    weak = StorageRef(storage)
    if weak.cdata in seen and not seen[weak.cdata].expired():
        return 0
    seen[weak.cdata] = weak  # no other storage gets the address while this reference exists
    return storage.nbytes()
