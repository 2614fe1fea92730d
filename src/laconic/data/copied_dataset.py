"""Data set of augmented examples, indexed by `copies_sampler.Draw`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from laconic.data.copies_sampler import Draw

Augment = Callable[[Any, torch.Generator], Any]


class CopiedDataset(Dataset[Any]):
    """Wrapper of `dataset` for a `CopiesSampler`: items are functions of (index, key).

    Args:
        dataset: Data set with items by index.
        augment: Function augment(example, generator) that returns an augmented example; an example is then
            read once for all its copies. None: the data set's own random transforms run for each copy, with
            torch's, Python's and NumPy's generators seeded by the key and restored afterwards.

    >>> dataset = CopiedDataset([10.0, 20.0], lambda x, rng: x + torch.rand(1, generator=rng).item())
    >>> one, again, other = dataset.__getitems__([Draw(0, 0, 7), Draw(0, 0, 7), Draw(0, 1, 8)])
    >>> one == again, one == other, int(other)
    (True, False, 10)
    """

    def __init__(self, dataset: Any, augment: Augment | None = None) -> None:
        self.dataset, self.augment = dataset, augment

    def __getitem__(self, draw: Draw) -> Any:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[Any]:
        if self.augment is None:
            return [self._transformed(draw) for draw in draws]
        read = {index: self.dataset[index] for index in dict.fromkeys(draw.example for draw in draws)}
        return [
            self.augment(read[draw.example], torch.Generator("cpu").manual_seed(draw.key >> 1))  # fits int64
            for draw in draws
        ]

    def _transformed(self, draw: Draw) -> Any:
        with seeded(draw.key):
            return self.dataset[draw.example]

    def __len__(self) -> int:
        return len(self.dataset)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed torch's CPU generator, Python's and NumPy's, and restore them at the end.

    >>> with seeded(1):
    ...     first = torch.rand(1), random.random(), np.random.rand()
    >>> with seeded(1):
    ...     first == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key >> 1)  # torch.manual_seed would seed all devices, for good
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
