"""Batch augmentation: several independent augmentations of each example in one step.

Hoffer et al. 2020, arXiv:1901.09335: batches with M copies of B examples take as many steps as batches of B,
at the same learning rate, and generalise better.
"""

from __future__ import annotations

from typing import Any, overload

import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.data.copied_dataset import Augment, CopiedDataset
from laconic.data.copies_sampler import Across, CopiesSampler

DEALT_TWICE = (
    "a DistributedSampler already distributes the examples, and batch augmentation does so itself: pass a"
    " loader without sampler=, with shuffle=True, or a sampler of all examples"
)


@overload
def batch_augmentation(
    source: DataLoader[Any],
    copies: int = 4,
    across: Across = "ranks",
    *,
    augment: Augment | None = None,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
) -> DataLoader[Any]: ...


@overload
def batch_augmentation(
    source: Sampler[Any],
    copies: int = 4,
    across: Across = "ranks",
    *,
    batch: int,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
) -> CopiesSampler: ...


def batch_augmentation(
    source: DataLoader[Any] | Sampler[Any],
    copies: int = 4,
    across: Across = "ranks",
    *,
    augment: Augment | None = None,
    batch: int | None = None,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
) -> DataLoader[Any] | CopiesSampler:
    """Return a loader like this one, with `copies` independent augmentations of each example.

    Pass the loader that one process would use: it distributes examples to ranks itself. Order and
    augmentation depend only on (seed, epoch, index, copy). Each iteration is the next epoch; a resumed run
    first calls `loader.batch_sampler.set_epoch(epoch, start=step)`. Examples that do not fill a step on all
    ranks are dropped.

    Args:
        source: A DataLoader with a `batch_size`, the number of distinct examples per rank and step; or a
            sampler, for which a `CopiesSampler` for your own DataLoader of a `CopiedDataset` is returned.
        copies: Augmented copies of each example, 1 or more.
        across: "ranks": groups of `copies` ranks load the same examples, with other augmentations. "batch": a
            batch holds all copies of its examples, all of copy 0 first: `laconic.recipes.Copies` splits it.
        augment: Function augment(example, generator) that returns an augmented example; an example is then
            read once per batch. None: the data set's own random transforms are seeded.
        batch: Distinct examples per rank and step; only with a sampler.
        seed: Equal on all ranks.
        rank: This rank. None: that of the default process group, or 0.
        size: Number of ranks. None: that of the default process group, or 1.

    Raises:
        SpecError: The data set is an IterableDataset, the loader has a DistributedSampler, a sampler with its
            own generator or no batch size, or `copies` does not divide the number of ranks.

    >>> import torch
    >>> loader = DataLoader(torch.arange(6.0), batch_size=3)
    >>> def noise(x, rng):
    ...     return x + torch.rand(1, generator=rng) / 9
    >>> noisy = batch_augmentation(loader, 2, "batch", augment=noise)
    >>> [[round(x) for x in batch.flatten().tolist()] for batch in noisy]
    [[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]]
    """
    known = dist.is_available() and dist.is_initialized()
    rank = (dist.get_rank() if known else 0) if rank is None else rank
    size = (dist.get_world_size() if known else 1) if size is None else size
    settings: dict[str, Any] = {"rank": rank, "size": size, "seed": seed}
    if isinstance(source, Sampler):
        arguments.whole("batch", batch, 1, hint="distinct examples per rank and step")
        assert batch is not None
        if isinstance(source, DistributedSampler) and source.num_replicas > 1:
            raise SpecError(DEALT_TWICE)
        return CopiesSampler(source, batch, copies, across, **settings)
    if not isinstance(source, DataLoader):
        raise SpecError(
            f"batch_augmentation takes a DataLoader or a sampler, got {type(source).__name__}: wrap the data"
            " set, DataLoader(dataset, batch_size=...)"
        )
    if batch is not None:
        raise SpecError(
            f"batch={batch} is only for a sampler; a loader has its batch_size, {source.batch_size}"
        )
    dealt, shuffle = _dealt(source)
    assert source.batch_size is not None
    sampler = CopiesSampler(dealt, source.batch_size, copies, across, shuffle=shuffle, **settings)
    return DataLoader(
        CopiedDataset(source.dataset, augment),
        batch_sampler=sampler,
        num_workers=source.num_workers,
        collate_fn=source.collate_fn,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=source.generator,
        prefetch_factor=source.prefetch_factor,
        persistent_workers=source.persistent_workers,
    )


def _dealt(loader: DataLoader[Any]) -> tuple[int | Sampler[Any], bool]:
    data = loader.dataset
    if isinstance(data, IterableDataset):
        raise SpecError(
            f"batch augmentation needs examples by index, and {type(data).__name__} is an IterableDataset,"
            " whose examples cannot be read again: pass a data set with __getitem__ and __len__, or"
            " repeat and augment each example inside its own iteration"
        )
    if loader.batch_size is None:
        raise SpecError(
            "batch augmentation makes batches itself, and this DataLoader has a batch_sampler or no batches:"
            " pass one with batch_size=, or the sampler of single examples with batch="
        )
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise SpecError(DEALT_TWICE)
    if type(sampler) is RandomSampler and not sampler.replacement:
        total = len(sampler.data_source)
        if sampler.num_samples == total:
            return total, True
    if type(sampler) is SequentialSampler:
        return len(sampler), False
    assert isinstance(sampler, Sampler)
    return sampler, False
