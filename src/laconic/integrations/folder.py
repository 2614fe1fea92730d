"""A handle's memory in the folder of a trainer's checkpoint.

    checkpoint-500/laconic.pt          what `handle.state_dict(gather=True)` returned on rank 0
    checkpoint-500/laconic-rank3.pt    where each rank saves its own: a memory beside shards of a model

Of the one file, rank 0 hands each rank its part, so only its machine needs it. Of several, each rank needs
its own where it resumes. A file is replaced as a whole.
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
    """Write the memory of all ranks into this folder. Called by all ranks, between steps."""
    rank = dist.get_rank()
    if not isinstance(handle, Handle) and handle.saved_by_each:
        Path(folder).mkdir(parents=True, exist_ok=True)  # rank 0 may have made it on its machine alone
        _write(handle.state_dict(), _of_rank(folder, name, rank))
        return
    state = handle.state_dict(gather=True)
    if rank == 0:
        _write(state, Path(folder) / f"{name}.pt")


def load(handle: Handle | ShardedHandle, folder: Path | str, name: str = NAME) -> bool:
    """Go on from what `save` wrote. Called by all ranks.

    Returns:
        Whether there was a file; if not, nothing has changed.

    Raises:
        StateError: On every rank: a file cannot be read, some ranks have none, or it is of another number of
            ranks, model, method or seed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if not isinstance(handle, Handle) and handle.saved_by_each:
        own = _read(_of_rank(folder, name, rank))
        _check_all_alike(own, folder, name)
    else:
        parts = _parts(Path(folder) / f"{name}.pt", size) if rank == 0 else None
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts)
        own = mine[0]
    if isinstance(own, str):
        raise StateError(f"rank {rank}: {own}")
    if own is None:
        return False
    handle.load_state_dict(own)
    return True


def _of_rank(folder: Path | str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-rank{rank}.pt"


def _write(state: Mapping[str, Any], path: Path) -> None:
    beside = path.with_name(f".{path.name}")
    torch.save(dict(state), beside)
    beside.replace(path)


def _read(path: Path) -> Any:
    """What the file holds; None if there is none, and what is wrong with it in words."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    except Exception as error:  # told to all ranks, which would wait for this one
        return f"{path} cannot be used: {error}"


def _check_all_alike(own: Any, folder: Path | str, name: str) -> None:
    """Raise `StateError` on every rank if some ranks have a state to load and others none, or a wrong one."""
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, own if isinstance(own, str) else own is not None)
    if wrong := [kind for kind in kinds if isinstance(kind, str)]:
        raise StateError(wrong[0])
    if len({*kinds}) > 1:
        lacking = [rank for rank, has in enumerate(kinds) if not has]
        raise StateError(
            f"ranks {lacking} have no file {name}-rank<rank>.pt in {folder}, and others have: resume each"
            " rank where its file is, or copy them all to a folder that every rank sees"
        )


def _parts(path: Path, size: int) -> list[Any]:
    """Each rank's state; None for all if there is no file, and for all what is wrong with one that is."""
    if not path.exists():
        return [None] * size
    state = _read(path)
    if isinstance(state, str):
        return [state] * size
    try:
        return [own_part(state, rank, size) for rank in range(size)]
    except Exception as error:  # told to all ranks, which would wait for rank 0
        return [f"{path} cannot be used: {error}"] * size
