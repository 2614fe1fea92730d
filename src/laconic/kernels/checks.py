"""Checks of arguments on which native code relies. Native code checks the bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments

LONGEST = 1 << 31  # elements that an int32 position can address


def flat(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if x.dtype is not dtype or x.dim() != 1 or not x.is_contiguous():
        kind = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(f"{name} must be a contiguous {dtype} vector, got {kind} {x.dtype} {tuple(x.shape)}")


def buffer(name: str, x: Tensor, segments: Segments) -> None:
    flat(name, x)
    if segments.end > x.numel():
        raise ValueError(f"{name} has {x.numel()} elements, but its segments end at {segments.end}")


def addressable(sizes: Sequence[int]) -> None:
    longest = max(sizes, default=0)
    if longest > LONGEST:
        raise ValueError(
            f"positions are int32, so a tensor has at most {LONGEST} elements, got {longest}: cut it into"
            " several tensors, or send it by a codec without positions, such as qsgd"
        )


def per_segment(name: str, values: Tensor, segments: Segments, dtype: torch.dtype = torch.int64) -> None:
    flat(name, values, dtype)
    if values.numel() != len(segments) or not values.is_cpu:
        raise ValueError(
            f"{name} must be a CPU tensor with one value a segment ({len(segments)}), "
            f"got {values.numel()} on {values.device}"
        )


def keys64(keys: Sequence[int], segments: int) -> Tensor:
    if len(keys) != segments:
        raise ValueError(f"one key a segment is needed ({segments}), got {len(keys)}")
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def chosen(indices: Tensor, counts: Tensor, segments: Segments) -> None:
    """Raise `WireError` unless counts are not negative and add up to the indices int32 (K,)."""
    addressable(segments.sizes)
    flat("indices", indices, torch.int32)
    per_segment("counts", counts, segments)
    given, k = counts.numpy(), indices.numel()
    for count in given[(given < 0) | (given > k)][:1]:  # a sum of hostile counts can overflow
        raise WireError(f"a count must be from 0 to the {k} indices, got {count}")
    if (total := int(given.sum())) != k:
        raise WireError(f"counts add up to {total}, but there are {k} indices")


def counted(counts: Tensor, segments: Segments) -> None:
    addressable(segments.sizes)
    given = counts.numpy()
    if ((given < 0) | (given > segments.sizes_tensor.numpy())).any():
        raise WireError("a count lies outside 0 .. the size of its tensor")
