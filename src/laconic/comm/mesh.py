"""Which ranks share a machine: as `torchrun` tells every process, or so many ranks in a row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise

import torch

from laconic.comm.comm import Comm
from laconic.core.errors import SpecError

TOLD = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what torchrun sets in the environment
WAY_OUT = "set local= to the number of ranks a machine"


def machines(comm: Comm, local: int = 0, environment: Mapping[str, str] | None = None) -> list[int]:
    """The number of each rank's machine, in rank order; machines are numbered by their first ranks.

    `local`: how many ranks in a row shared a machine before any was lost; 0 asks the environment of every
    rank, and is called by all ranks. Raises `SpecError`, on every rank alike, where the ranks do not divide
    or do not fit together.

    >>> from laconic.comm.loopback import Loopback
    >>> machines(Loopback.world(4)[0], local=2)
    [0, 0, 1, 1]
    """
    if local:
        if comm.began % local:
            raise SpecError(
                f"local={local} does not divide the {comm.began} ranks of this group: {WAY_OUT},"
                " or local=0 to take it from torchrun"
            )
        firsts = list(dict.fromkeys(seat // local for seat in comm.seats))
        return [firsts.index(seat // local) for seat in comm.seats]
    own = _told(os.environ if environment is None else environment)
    heard = [tuple(each.tolist()) for each in comm.all_gather(torch.tensor(own, dtype=torch.int64))]
    for rank, (_, place, size) in enumerate(heard):
        if not 0 <= place < size:
            raise SpecError(
                f"rank {rank} does not know its machine: {', '.join(TOLD)} are not all set in its"
                f" environment, or do not fit; start with torchrun, or {WAY_OUT}"
            )
    homes = sorted({(first, size) for first, _, size in heard})
    shared = any(first + size > other for (first, size), (other, _) in pairwise(homes))
    if shared or len(set(heard)) < len(heard):
        raise SpecError(
            f"machines overlap: they begin at ranks {[first for first, _, _ in heard]} (RANK - LOCAL_RANK, as"
            f" each rank says) and have {[size for _, _, size in heard]} (LOCAL_WORLD_SIZE); number ranks"
            f" machine by machine, as torchrun does, or {WAY_OUT}"
        )
    firsts = list(dict.fromkeys(first for first, _, _ in heard))
    return [firsts.index(first) for first, _, _ in heard]


def _told(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """The first rank of this machine, this rank's place there, and how many there are; size 0 if unknown."""
    try:
        rank, place, size = (int(environment[name]) for name in TOLD)
    except (KeyError, ValueError):
        return 0, 0, 0
    return rank - place, place, size
