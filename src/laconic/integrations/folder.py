"""A handle's memory in the folder of a trainer's checkpoint: one file, written and read by rank 0.

    checkpoint-500/laconic.pt     what `handle.state_dict(gather=True)` returned on rank 0

Rank 0 hands each rank its part, so only its machine needs the file. The file is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from laconic.core.errors import StateError
from laconic.ddp.handle import Handle
from laconic.exchange.gathered import own_part

if TYPE_CHECKING:
    from laconic.ddp.fsdp import ShardedHandle

NAME = "laconic"


def save(handle: Handle | ShardedHandle, folder: Path | str, name: str = NAME) -> None:
    """Write the memory of all ranks into this folder, as NAME.pt. Called by all ranks, between steps."""
    state = handle.state_dict(gather=True)
    if dist.get_rank() == 0:
        path = Path(folder) / f"{name}.pt"
        beside = path.with_name(f".{path.name}")
        torch.save(dict(state), beside)
        beside.replace(path)


def load(handle: Handle | ShardedHandle, folder: Path | str, name: str = NAME) -> bool:
    """Go on from what `save` wrote. Called by all ranks.

    Returns:
        Whether there was a file; if not, nothing has changed.

    Raises:
        StateError: On every rank: the file cannot be read, or is of another number of ranks, model, method or
            seed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = _parts(Path(folder) / f"{name}.pt", size) if rank == 0 else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parts)
    if isinstance(mine[0], str):
        raise StateError(f"rank {rank}: {mine[0]}")
    if mine[0] is None:
        return False
    handle.load_state_dict(mine[0])
    return True


def _parts(path: Path, size: int) -> list[Any]:
    """Each rank's state; None for all if there is no file, and for all what is wrong with one that is."""
    if not path.exists():
        return [None] * size
    try:
        state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return [own_part(state, rank, size) for rank in range(size)]
    except Exception as error:  # told to all ranks, which would wait for rank 0
        return [f"{path} cannot be used: {error}"] * size
