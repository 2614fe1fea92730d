"""Checkpoints that count only when every rank has written its part.

    folder/step-000123/rank0.pt     one part a rank: replicas share a model, but no rank another's residual
    folder/step-000123/rank1.pt
    folder/step-000123/COMPLETE     world size and SHA-256 of every part, written last, by rank 0

Each file is written beside its place, flushed to the disk and renamed, so that a crash at any moment leaves
either the whole file or none. All ranks write to one folder that they share.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from laconic.core.errors import StateError

MARKER = "COMPLETE"


def save(
    folder: Path,
    state: dict[str, Any],
    *,
    step: int,
    rank: int,
    size: int,
    barrier: Callable[[], object],
    keep: int = 2,
) -> Path:
    """Write this rank's part of a step's checkpoint, and complete it together with the other ranks.

    Every rank calls it at the same step. `barrier` returns when all ranks have entered it. The `keep` newest
    complete checkpoints stay, older ones go.
    """
    place = folder / f"step-{step:06d}"
    place.mkdir(parents=True, exist_ok=True)
    _write_atomically(place / f"rank{rank}.pt", lambda path: torch.save(state, path))
    barrier()
    if rank == 0:
        parts = [place / f"rank{r}.pt" for r in range(size)]
        missing = [part for part in parts if not part.is_file()]
        if missing:
            raise StateError(f"{missing[0]} is not there: all ranks must write to one folder that they share")
        marker = {"step": step, "world_size": size, "sha256": {part.name: _digest(part) for part in parts}}
        _write_atomically(place / MARKER, lambda path: path.write_text(json.dumps(marker, indent=1)))
        for old in complete(folder)[:-keep]:
            (old / MARKER).unlink()  # first, so that a half-removed checkpoint does not count
            shutil.rmtree(old)
    barrier()
    return place


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder that every rank has finished, oldest first."""
    places = [path.parent for path in folder.glob(f"step-*/{MARKER}")]
    return sorted((path for path in places if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete(folder)), None)


def step_of(place: Path) -> int:
    """The step of a checkpoint, from its folder's name.

    >>> step_of(Path("step-000123"))
    123
    """
    return int(place.name.removeprefix("step-"))


def load(place: Path, *, rank: int, size: int) -> dict[str, Any]:
    """This rank's part of a checkpoint, on the CPU; nothing in it is code.

    Raises `StateError`, naming the file, for an incomplete or damaged checkpoint or one of another world
    size. It never falls back to an older one: that is the caller's choice, and `complete` lists them.
    """
    marker = _marker(place)
    if marker["world_size"] != size:
        raise StateError(
            f"{place} was written by {marker['world_size']} ranks, this run has {size}: "
            "start as many, or carry the state over with laconic.resize"
        )
    part = place / f"rank{rank}.pt"
    if not part.is_file():
        raise StateError(f"{part} is gone, though {place / MARKER} lists it; {_way_out(place)}")
    if _digest(part) != marker["sha256"].get(part.name):
        raise StateError(f"{part} is damaged: its bytes are not those that were written; {_way_out(place)}")
    try:
        state: dict[str, Any] = torch.load(part, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, BadZipFile, RuntimeError, EOFError, OSError) as error:
        raise StateError(f"cannot read {part}: {error}; {_way_out(place)}") from error
    return state


def _marker(place: Path) -> dict[str, Any]:
    path = place / MARKER
    if not path.is_file():
        raise StateError(f"{place} is not complete: not every rank has written its part; {_way_out(place)}")
    try:
        marker: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(marker["world_size"], int) or not isinstance(marker["sha256"], dict):
            raise TypeError("world_size or sha256 has another type")
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is damaged: {error!r}; {_way_out(place)}") from error
    return marker


def _way_out(place: Path) -> str:
    older = [path for path in complete(place.parent) if step_of(path) < step_of(place)]
    if older:
        return f"remove {place} to go on from {older[-1].name}"
    return f"remove {place} to start anew"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        _flush(beside)
        beside.replace(path)
        _flush(path.parent)  # the new name itself
    finally:
        beside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
