"""Tables of segments: integers that the host computes from counts and sizes, sent to a device in one copy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]

BITS = tuple(1 << bit for bit in range(8))


def uploaded(values: Numbers, device: torch.device) -> Tensor:
    """Return these integers on a device. The host does not wait for work queued there."""
    table = torch.from_numpy(values)
    if device.type == "cpu":
        return table
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def expanded(table: Tensor, repeats: Tensor, total: int) -> tuple[Tensor, ...]:
    """Return the rows of table int64 (r, t), column i repeated repeats[i] times.

    Each is int64 (total,), or (1,) of a table of one column, which stands for as many.
    """
    if table.shape[1] == 1:
        return table.unbind()
    owner = torch.repeat_interleave(repeats, output_size=total)
    return table.index_select(1, owner).unbind()


@lru_cache(maxsize=64)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return these bytes as uint8 (n,) on a device. The tensor is shared: do not change it."""
    return torch.tensor(values, dtype=torch.uint8, device=device)
