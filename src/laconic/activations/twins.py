"""Which saved tensors hold the same elements, so that one coding serves them all."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from laconic.activations.kept import Coded, Order
from laconic.activations.ledger import Watch

Key = tuple[int, int, int, int, torch.dtype, bool, tuple[int, ...]]
FEW = 256  # codings to look for twins among, before the dead ones are forgotten


def elements(saved: Tensor) -> Key:
    """Of two tensors with one key, `Order.flat` gives the same elements, whatever their shapes.

    A dense tensor is known by its place in its storage, and so are its flattened views. One with other
    strides (a transpose, every second row) is known by its shape and strides as well.
    """
    dense = saved.is_contiguous() or Order.of(saved).last
    form = () if dense else (*saved.shape, *saved.stride())
    place = int(saved.untyped_storage()._cdata), int(saved._version), int(saved.storage_offset())
    return *place, saved.numel(), saved.dtype, saved.is_neg(), form


class Twins:
    """Codings that backward still waits for, by what they hold. They live as long as a graph keeps them."""

    def __init__(self) -> None:
        self._coded: dict[Key, tuple[Any, weakref.ref[Coded]]] = {}

    def find(self, key: Key) -> Coded | None:
        """The coding of these elements, if there is one."""
        found = self._coded.get(key)
        return found[1]() if found is not None and not found[0].expired() else None

    def add(self, key: Key, saved: Tensor, coded: Coded) -> None:
        """`coded` holds the elements of `saved`."""
        if len(self._coded) >= FEW:
            self._coded = {k: v for k, v in self._coded.items() if not v[0].expired()}
        self._coded[key] = Watch(saved.untyped_storage()), weakref.ref(coded)
