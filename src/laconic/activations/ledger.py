"""Bytes saved for backward by layer, dense and compressed. Each storage counts once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

StorageRef: Any = reductions.StorageWeakRef  # unlike an address, not reused


class Ledger:
    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self._dense: dict[int, Any] = {}
        self._exact: dict[int, Any] = {}

    def add(self, label: str, saved: Tensor, kept: int | None) -> None:
        row = self.rows.setdefault(label, [0, 0])
        row[0] += _once(saved, self._dense)
        row[1] += _once(saved, self._exact) if kept is None else kept

    def resolve(self, label: str, nbytes: int) -> None:
        self.rows.setdefault(label, [0, 0])[1] += nbytes


def _once(saved: Tensor, seen: dict[int, Any]) -> int:
    storage = saved.untyped_storage()
    weak = StorageRef(storage)
    if weak.cdata in seen and not seen[weak.cdata].expired():
        return 0
    seen[weak.cdata] = weak  # the address is not reused while this exists
    return storage.nbytes()
