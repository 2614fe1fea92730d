"""Data sets: partitions among clients, sample ids, batch augmentation, and memory by sample."""

from laconic.data.batch_augmentation import batch_augmentation as batch_augmentation
from laconic.data.copied_dataset import CopiedDataset as CopiedDataset
from laconic.data.copies_sampler import CopiesSampler as CopiesSampler
from laconic.data.with_ids import with_ids as with_ids

__all__ = ["CopiedDataset", "CopiesSampler", "batch_augmentation", "with_ids"]
