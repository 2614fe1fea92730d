"""Data set whose items include their index."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

from torch.utils.data import Dataset


class MapStyle(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class WithIds(Dataset[tuple[Any, ...]]):
    """Dataset whose item i is (i, *item), or (i, item) if the item is not a tuple."""

    def __init__(self, dataset: MapStyle) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        item = self.dataset[index]
        return (index, *item) if isinstance(item, tuple) else (index, item)


def with_ids(dataset: MapStyle) -> WithIds:
    """Return the dataset with the index of each item in front: ids for `laconic.pipeline`.

    A `DataLoader` returns a batch's ids as int64 (batch,). Raises `TypeError` if the dataset has no length or
    no items by index.

    >>> with_ids([("a", 0), ("b", 1)])[1]
    (1, 'b', 1)
    """
    if not isinstance(dataset, Sized) or not callable(getattr(dataset, "__getitem__", None)):
        raise TypeError(
            f"with_ids needs a dataset with a length and items by index, got {type(dataset).__name__}"
        )
    return WithIds(dataset)
