"""Masks are equal on all ranks, or training ends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.core.errors import PeerError


def refuse_other_masks(chosen: Mapping[str, Tensor], comm: Comm, turn: int) -> None:
    """Raise `PeerError` unless all ranks have chosen these masks, bool, by name: 8 bytes a rank."""
    digest = hashlib.blake2b(digest_size=8)
    for used in chosen.values():
        digest.update(kernels.pack_bits(used.int().cpu(), 1).numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    for rank, other in enumerate(comm.all_gather(mine)):
        if not torch.equal(mine, other):
            raise PeerError(
                f"rank {comm.rank}: rank {rank} has chosen other masks at turn {turn}, as replicas differ:"
                " sparse training needs replicas that are equal at every step, as under"
                " DistributedDataParallel; for replicas that are meant to differ take static_masks()"
            )
