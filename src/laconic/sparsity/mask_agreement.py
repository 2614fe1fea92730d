"""Check that masks are equal on all ranks. Sends 8 bytes per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.core.errors import PeerError


def check_equal_masks(chosen: Mapping[str, Tensor], comm: Comm, turn: int) -> None:
    digest = hashlib.blake2b(digest_size=8)
    for used in chosen.values():
        digest.update(kernels.pack_bits(used.int().cpu(), 1).numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    for rank, other in enumerate(comm.all_gather(mine)):
        if not torch.equal(mine, other):
            raise PeerError(
                f"rank {comm.rank}: rank {rank} has chosen other masks at turn {turn}, as replicas differ:"
                " sparse training needs equal replicas at every step, as under DistributedDataParallel; if"
                " replicas should differ, use static_masks()"
            )
