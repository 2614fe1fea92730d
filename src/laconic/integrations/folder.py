"""State of a handle in the folder of a trainer's checkpoint.

    checkpoint-500/laconic.pt          result of `handle.state_dict(gather=True)` on rank 0
    checkpoint-500/laconic-rank3.pt    one file per rank, for error feedback on a sharded model

Only rank 0 reads the single file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from laconic.core.atomic_file import replacing
from laconic.core.errors import StateError
from laconic.ddp.handle import Handle
from laconic.exchange.gathered import own_part

if TYPE_CHECKING:
    from laconic.fsdp.handle import ShardedHandle

NAME = "laconic"


def save(handle: Handle | ShardedHandle, folder: Path | str, name: str = NAME) -> None:
    """Write the state of all ranks. Call it on all ranks, between steps."""
    rank = dist.get_rank()
    if handle.saved_by_each:
        Path(folder).mkdir(parents=True, exist_ok=True)  # rank 0 may have it on another machine
        _write(handle.state_dict(), _of_rank(folder, name, rank))
        return
    state = handle.state_dict(gather=True)
    if rank == 0:
        _write(state, Path(folder) / f"{name}.pt")


def load(handle: Handle | ShardedHandle, folder: Path | str, name: str = NAME) -> bool:
    """Restore the state that `save` wrote, and return whether a file exists. Call it on all ranks.

    Raises `StateError` on every rank if a file cannot be read or is missing on some ranks, or is of another
    number of ranks, model, method or seed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if handle.saved_by_each:
        return _load_own(handle, folder, name)
    if isinstance(handle, Handle):
        handle.call_jointly("the loading of a checkpoint")
    parts = _parts(Path(folder) / f"{name}.pt", size) if rank == 0 else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parts)
    if isinstance(mine[0], str):
        raise StateError(f"rank {rank}: {mine[0]}")
    if mine[0] is None:
        return False
    handle.load_state_dict(mine[0])
    return True


def _load_own(handle: Handle | ShardedHandle, folder: Path | str, name: str) -> bool:
    """Run `load` with one file per rank. If one fails, all keep their state and fail."""
    before = handle.state_dict()
    own = _read(_of_rank(folder, name, dist.get_rank()))
    wrong = own if isinstance(own, str) else None
    if isinstance(own, dict):
        try:
            handle.load_state_dict(own)
        except Exception as error:  # the other ranks would continue
            wrong = (
                str(error) if isinstance(error, StateError) else f"it is not the state of a handle: {error!r}"
            )
    step = own.get("step") if isinstance(own, dict) and wrong is None else None
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (wrong, step))
    refused = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(answers) if why is not None]
    if not refused and len({step for _, step in answers}) > 1:
        steps = ", ".join("none" if step is None else str(step) for _, step in answers)
        refused = [
            f"the files {name}-rank<rank>.pt in {folder} are of different steps ({steps}, by rank): resume"
            " from one checkpoint that all ranks completed, each rank where its file is"
        ]
    if refused:
        handle.load_state_dict(before)
        raise StateError(refused[0])
    return own is not None


def _of_rank(folder: Path | str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-rank{rank}.pt"


def _write(state: Mapping[str, Any], path: Path) -> None:
    with replacing(path) as file:
        torch.save(dict(state), file)


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    except Exception as error:  # the other ranks would wait
        return f"{path} cannot be used: {error}"


def _parts(path: Path, size: int) -> list[Any]:
    if not path.exists():
        return [None] * size
    state = _read(path)
    if isinstance(state, str):
        return [state] * size
    try:
        return [own_part(state, rank, size) for rank in range(size)]
    except Exception as error:  # the other ranks would wait
        return [f"{path} cannot be used: {error}"] * size
