"""Copies of one rank's tensors on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from laconic.comm.comm import Comm


def copy_from_root(tensors: Sequence[Tensor], comm: Comm, root: int) -> None:
    """Copy the root's tensors, if they differ, to all ranks. Called by all ranks."""
    if not tensors:
        return
    own = torch.tensor([_digest(each) for each in tensors], device=tensors[0].device, dtype=torch.int64)
    differs = comm.all_reduce((comm.broadcast(own.clone(), root) != own).long(), "max")
    for each in compress(tensors, differs.tolist()):  # the others may be expanded, so only readable
        wire = comm.broadcast(_bytes(each).clone(), root)  # no backend has all dtypes
        each.detach().copy_(wire.view(each.dtype).view(each.shape))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def _digest(x: Tensor) -> int:
    hashed = hashlib.blake2b(_bytes(x).cpu().numpy().tobytes(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)
