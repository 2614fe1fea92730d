"""Encodings shared by saved tensors with the same elements."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from laconic.activations.ledger import StorageRef
from laconic.activations.saved import Encoded, MemoryOrder

Key = tuple[int, int, int, int, torch.dtype, bool, tuple[int, ...]]
MAX_ENTRIES = 256  # entries before expired ones are dropped


def elements(saved: Tensor) -> Key:
    """Return a key that is equal for tensors for which `MemoryOrder.flat` gives the same elements.

    A dense tensor and its flattened views are identified by their place in the storage, other tensors (a
    transpose, every second row) also by shape and strides.
    """
    dense = saved.is_contiguous() or MemoryOrder.of(saved).channels_last
    form = () if dense else (*saved.shape, *saved.stride())
    place = int(saved.untyped_storage()._cdata), int(saved._version), int(saved.storage_offset())
    return *place, saved.numel(), saved.dtype, saved.is_neg(), form


class SharedEncodings:
    """Encodings by elements, as weak references: a graph keeps them alive until backward."""

    def __init__(self) -> None:
        self._coded: dict[Key, tuple[Any, weakref.ref[Encoded]]] = {}

    def find(self, key: Key) -> Encoded | None:
        found = self._coded.get(key)
        return found[1]() if found is not None and not found[0].expired() else None

    def add(self, key: Key, saved: Tensor, coded: Encoded) -> None:
        if len(self._coded) >= MAX_ENTRIES:
            self._coded = {k: v for k, v in self._coded.items() if not v[0].expired()}
        self._coded[key] = StorageRef(saved.untyped_storage()), weakref.ref(coded)
