"""Checks of arguments in Python: native code relies on them, and checks received bytes itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments

LONGEST = 1 << 31  # elements of a tensor whose positions, int32 from its start, travel


def flat(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """A contiguous vector of this dtype."""
    if x.dtype is not dtype or x.dim() != 1 or not x.is_contiguous():
        kind = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(f"{name} must be a contiguous {dtype} vector, got {kind} {x.dtype} {tuple(x.shape)}")


def buffer(name: str, x: Tensor, segments: Segments) -> None:
    """A flat float32 buffer that holds all the segments."""
    flat(name, x)
    if segments.end > x.numel():
        raise ValueError(f"{name} has {x.numel()} elements, but its segments end at {segments.end}")


def addressable(sizes: Sequence[int]) -> None:
    """No tensor has elements that an int32 position cannot reach."""
    longest = max(sizes, default=0)
    if longest > LONGEST:
        raise ValueError(
            f"positions are int32, so a tensor has at most {LONGEST} elements, got {longest}: cut it in"
            " several, or send it by a codec without positions, such as qsgd"
        )


def per_segment(name: str, values: Tensor, segments: Segments, dtype: torch.dtype = torch.int64) -> None:
    """One value a segment, on the CPU."""
    flat(name, values, dtype)
    if values.numel() != len(segments) or not values.is_cpu:
        raise ValueError(
            f"{name} must be a CPU tensor with one value a segment ({len(segments)}), "
            f"got {values.numel()} on {values.device}"
        )


def keys64(keys: Sequence[int], segments: int) -> Tensor:
    """Keys, one a segment, as the bits of int64 (s,)."""
    if len(keys) != segments:
        raise ValueError(f"one key a segment is needed ({segments}), got {len(keys)}")
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def chosen(indices: Tensor, counts: Tensor, segments: Segments) -> None:
    """Indices int32 (K,), and counts (s,) that say how many belong to each segment; `WireError` if not."""
    addressable(segments.sizes)
    flat("indices", indices, torch.int32)
    per_segment("counts", counts, segments)
    given, k = counts.numpy(), indices.numel()
    for count in given[(given < 0) | (given > k)][
        :1
    ]:  # one by one, for hostile counts can wrap their sum round
        raise WireError(f"a count must be from 0 to the {k} indices, got {count}")
    if (total := int(given.sum())) != k:
        raise WireError(f"counts add up to {total}, but there are {k} indices")


def counted(counts: Tensor, segments: Segments) -> None:
    """Raise `WireError` unless 0 <= count <= size for every segment, `ValueError` for a segment too long."""
    addressable(segments.sizes)
    given = counts.numpy()
    if ((given < 0) | (given > segments.sizes_tensor.numpy())).any():
        raise WireError("a count lies outside 0 .. the size of its tensor")
