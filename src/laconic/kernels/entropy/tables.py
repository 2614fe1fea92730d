"""Integer tables of segments, sent to a device in one copy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.framing import sent_to

Numbers = NDArray[np.int64]

BITS = tuple(1 << bit for bit in range(8))


def uploaded(values: Numbers, device: torch.device) -> Tensor:
    """Copy integers to a device without waiting."""
    return sent_to(torch.from_numpy(values), device)


def expanded(table: Tensor, repeats: Tensor, total: int) -> tuple[Tensor, ...]:
    """Return the rows of table int64 (r, t), column i repeated repeats[i] times.

    A single column is (1,), to be broadcast.
    """
    if table.shape[1] == 1:
        return table.unbind()
    owner = torch.repeat_interleave(repeats, output_size=total)
    return table.index_select(1, owner).unbind()


def per_index(values: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Return host values (s,), each repeated counts[i] times, without waiting.

    >>> per_index(torch.tensor([5, 7]), torch.tensor([2, 1]), torch.device("cpu")).tolist()
    [5, 5, 7]
    """
    return sent_to(torch.repeat_interleave(values, counts), device)


@lru_cache(maxsize=64)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return bytes on a device. Cached: do not change it."""
    return torch.tensor(values, dtype=torch.uint8, device=device)
