"""Sample ids: each item of a dataset together with its index, which a shuffled loader keeps."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

from torch.utils.data import Dataset


class MapStyle(Protocol):
    """A dataset with a length and items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class WithIds(Dataset[tuple[Any, ...]]):
    """A dataset whose item i is (i, *item), or (i, item) where the item is no tuple."""

    def __init__(self, dataset: MapStyle) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        item = self.dataset[index]
        return (index, *item) if isinstance(item, tuple) else (index, item)


def with_ids(dataset: MapStyle) -> WithIds:
    """The same dataset, with the index of each item in front: ids for `laconic.pipeline`.

    A `DataLoader` gives a batch's ids as int64 (batch,), whatever its sampler's order.

    Raises:
        TypeError: for a dataset without a length, such as an iterable one: its items have no index that is
            the same in every epoch.

    >>> with_ids([("a", 0), ("b", 1)])[1]
    (1, 'b', 1)
    """
    if not isinstance(dataset, Sized) or not callable(getattr(dataset, "__getitem__", None)):
        raise TypeError(
            f"with_ids takes a dataset with a length and items by index, got {type(dataset).__name__}"
        )
    return WithIds(dataset)
