"""Checks of a batch's sample ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.errors import StateError


def sample_ids(ids: Tensor | Sequence[int] | None, samples: int, *, missing: str, call: str) -> Tensor:
    """Return the ids of a batch, int64 (batch,) on the CPU.

    Raises `StateError` unless they are unique integers in 0..samples - 1. `missing`: message without ids;
    `call`: function that got `samples`.
    """
    if ids is None:
        raise StateError(missing)
    found = torch.as_tensor(ids, dtype=None, device="cpu")
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise StateError(
            f"sample ids must be a vector of integers, got {found.dtype} of {tuple(found.shape)}"
        )
    found = found.to("cpu", torch.int64, copy=True)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < samples:
        wrong = int(found.max()) if int(found.max()) >= samples else int(found.min())
        raise StateError(
            f"sample ids must be in 0..{samples - 1}, got {wrong}: pass {call} the number of samples of the"
            f" whole dataset, samples={max(wrong + 1, samples)} or more"
        )
    values, counts = torch.unique(found, return_counts=True)
    if len(values) != len(found):
        twice = int(values[counts > 1][0])
        raise StateError(f"sample ids in a batch must be unique, got {twice} {int(counts.max())} times")
    return found
