"""The states of all ranks on the first, for a checkpoint that one rank writes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from laconic.comm.comm import Comm
from laconic.comm.waiting import log_if_slow
from laconic.core.errors import StateError
from laconic.exchange.state import FORMAT, RankState


class GatheredState(TypedDict):
    """`ranks`: every rank's state in rank order; empty on all ranks but the first."""

    format: int
    ranks: list[RankState]


def gather_states(state: RankState, comm: Comm) -> GatheredState:
    """Every rank's state, on rank 0, in host memory. Called by all ranks.

    Wire: each rank sends its state to rank 0, as `torch.save` writes it, after 8 bytes of length.
    """
    return GatheredState(format=FORMAT, ranks=gathered(state, comm))


def same_states(state: RankState, comm: Comm) -> GatheredState:
    """Return every rank's state on rank 0, where ranks have no memory: they differ by their rank alone."""
    ranks = range(comm.size if comm.rank == 0 else 0)
    return GatheredState(format=FORMAT, ranks=[RankState(**{**state, "rank": rank}) for rank in ranks])


def gathered(value: Any, comm: Comm) -> list[Any]:
    """Every rank's value on rank 0, in rank order and in host memory; an empty list on the other ranks.

    Called by all ranks. The value is one that `torch.load(weights_only=True)` reads.
    """
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    with log_if_slow(comm.rank, "state_dict(gather=True)"):
        lengths = torch.cat(
            comm.all_gather(torch.tensor([mine.numel()], dtype=torch.int64, device="cpu"))
        ).tolist()
    if comm.rank:
        comm.exchange({0: mine}, {})
        return []
    came = {
        rank: torch.empty(length, dtype=torch.uint8, device="cpu")
        for rank, length in enumerate(lengths)
        if rank
    }
    comm.exchange({}, came)
    files = [mine, *(came[rank] for rank in sorted(came))]
    return [
        torch.load(io.BytesIO(each.numpy().tobytes()), map_location="cpu", weights_only=True)
        for each in files
    ]


def own_part(state: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """This rank's part of gathered states; any other state as it is. Raises `StateError` for another size."""
    if "ranks" not in state:
        return state
    states = state["ranks"]
    if not states:
        raise StateError(
            f"rank {rank}: these gathered states are empty: state_dict(gather=True) puts them on rank 0, so"
            " save them there, and load that file on every rank"
        )
    if len(states) != size:
        raise StateError(
            f"rank {rank}: the saved states are of {len(states)} ranks, this group has {size}:"
            f" laconic.resize(state['ranks'], {size}) makes states for another number of ranks"
        )
    part: Mapping[str, Any] = states[rank]
    return part
