"""States of all ranks on rank 0, for a checkpoint written by one rank."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_numbers
from laconic.comm.waiting import log_if_slow
from laconic.core.errors import StateError
from laconic.exchange.state import FORMAT, RankState


class GatheredState(TypedDict):
    """Gathered states. `ranks`: every rank's state on rank 0, empty on other ranks."""

    format: int
    ranks: list[RankState]


def gather_states(state: RankState, comm: Comm) -> GatheredState:
    """Gather every rank's state on rank 0, in host memory. Call it on all ranks.

    Wire: 8 bytes of length and the state in `torch.save` format.
    """
    return GatheredState(format=FORMAT, ranks=gathered(state, comm))


def same_states(state: RankState, comm: Comm) -> GatheredState:
    """Return every rank's state on rank 0, for ranks without memory."""
    ranks = range(comm.size if comm.rank == 0 else 0)
    return GatheredState(format=FORMAT, ranks=[RankState(**{**state, "rank": rank}) for rank in ranks])


def gathered(value: Any, comm: Comm) -> list[Any]:
    """Gather every rank's value on rank 0, in rank order and host memory; [] elsewhere. Call it on all ranks.

    `torch.load(weights_only=True)` must be able to read the value.
    """
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    with log_if_slow(comm.rank, "state_dict(gather=True)"):
        lengths = gather_numbers(comm, mine.numel())
    if comm.rank:
        comm.exchange({0: mine}, {})
        return []
    others = [torch.empty(length, dtype=torch.uint8, device="cpu") for (length,) in lengths[1:]]
    comm.exchange({}, dict(enumerate(others, 1)))
    files = (io.BytesIO(each.numpy().tobytes()) for each in (mine, *others))
    return [torch.load(each, map_location="cpu", weights_only=True) for each in files]


def own_part(state: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """Return this rank's part of gathered states, or `state`. Raises `StateError` for another size."""
    if "ranks" not in state:
        return state
    states = state["ranks"]
    if not states:
        raise StateError(
            f"rank {rank}: these gathered states are empty, since state_dict(gather=True) returns them on"
            " rank 0: save them there, and load that file on every rank"
        )
    if len(states) != size:
        raise StateError(
            f"rank {rank}: the saved states are of {len(states)} ranks, this group has {size}:"
            f" convert them by laconic.resize(state['ranks'], {size})"
        )
    part: Mapping[str, Any] = states[rank]
    return part
