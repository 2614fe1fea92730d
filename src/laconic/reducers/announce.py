"""Announce: one rank's message goes to all, unless any rank has something against it."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.comm import Comm

NOT_FINITE = 1 << 62  # stands where the length of the message would


def announce(comm: Comm, leader: int, wire: Tensor, finite: bool) -> Tensor | None:
    """The leader's wire uint8 (m,), on every rank; None on every rank where one says `finite` is False.

    Two rounds: the length, 8 bytes a rank, for the others do not know it; then a broadcast.

    >>> from laconic.comm.loopback import Loopback
    >>> said = Loopback.run(2, lambda comm: announce(comm, 1, torch.arange(comm.rank * 3).byte(), True))
    >>> [wire.tolist() for wire in said]
    [[0, 1, 2], [0, 1, 2]]
    """
    mine = comm.rank == leader
    length = torch.tensor([wire.numel() if mine else 0], dtype=torch.int64, device=wire.device)
    if not finite:
        length.fill_(NOT_FINITE)
    nbytes = int(comm.all_reduce(length, "max"))
    if nbytes == NOT_FINITE:
        return None
    return comm.broadcast(wire if mine else wire.new_empty(nbytes), leader)
