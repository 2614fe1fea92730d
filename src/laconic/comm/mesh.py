"""Assignment of ranks to machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_numbers
from laconic.core.errors import SpecError

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
HINT = "set ranks_per_node= to the number of ranks per machine"


def machines(comm: Comm, ranks_per_node: int = 0, environment: Mapping[str, str] | None = None) -> list[int]:
    """Return the number of each rank's machine; machines are ordered by their first ranks.

    `ranks_per_node`: consecutive ranks per machine before any was lost; 0: torchrun's variables, gathered.
    Raises `SpecError` on every rank if the ranks do not divide, or the environments contradict each other.

    >>> from laconic.comm.loopback import Loopback
    >>> machines(Loopback.world(4)[0], ranks_per_node=2)
    [0, 0, 1, 1]
    """
    if ranks_per_node:
        if comm.original_size % ranks_per_node:
            raise SpecError(
                f"ranks_per_node={ranks_per_node} does not divide the {comm.original_size} ranks of this"
                f" group: {HINT}, or ranks_per_node=0 to use torchrun's variables"
            )
        firsts = list(dict.fromkeys(rank // ranks_per_node for rank in comm.original_ranks))
        return [firsts.index(rank // ranks_per_node) for rank in comm.original_ranks]
    own = _from_environment(os.environ if environment is None else environment)
    places = gather_numbers(comm, *own)
    for rank, (_, place, size) in enumerate(places):
        if not 0 <= place < size:
            raise SpecError(
                f"rank {rank} does not know its machine: {', '.join(TORCHRUN_VARIABLES)} are not all set in"
                f" its environment, or do not fit; start with torchrun, or {HINT}"
            )
    homes = sorted({(first, size) for first, _, size in places})
    shared = any(first + size > other for (first, size), (other, _) in pairwise(homes))
    if shared or len(set(places)) < len(places):
        raise SpecError(
            f"machines overlap: they start at ranks {[first for first, _, _ in places]} (RANK - LOCAL_RANK"
            f" of each rank) and have {[size for _, _, size in places]} ranks (LOCAL_WORLD_SIZE); number"
            f" ranks machine by machine, as torchrun does, or {HINT}"
        )
    firsts = list(dict.fromkeys(first for first, _, _ in places))
    return [firsts.index(first) for first, _, _ in places]


def ranks_beside(ranks_per_node: int = 0) -> int:
    """Return the number of ranks on this machine; 1 if unknown.

    >>> ranks_beside(ranks_per_node=8)
    8
    """
    return ranks_per_node or max(1, _from_environment(os.environ)[2])


def _from_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return this machine's first rank, the local rank, and the number of ranks; 0 if unknown."""
    try:
        rank, place, size = (int(environment[name]) for name in TORCHRUN_VARIABLES)
    except (KeyError, ValueError):
        return 0, 0, 0
    return rank - place, place, size
