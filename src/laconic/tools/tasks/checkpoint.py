"""Checkpoints in a shared folder, complete once every rank has written its part.

    folder/step-000123/rank0.pt     one part per rank
    folder/step-000123/rank1.pt
    folder/step-000123/COMPLETE     world size and SHA-256 of every part

Rank 0 writes `COMPLETE` last.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from laconic.core.atomic_file import replacing, write_text
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
    """Write this rank's part of a checkpoint, and complete it together with the other ranks.

    `barrier` returns once all ranks have called it. `keep`: complete checkpoints to keep. Raises `StateError`
    on rank 0 if a part is missing: the ranks do not share `folder`.
    """
    place = folder / f"step-{step:06d}"
    place.mkdir(parents=True, exist_ok=True)
    with replacing(place / f"rank{rank}.pt") as file:
        torch.save(state, file)
    barrier()
    if rank == 0:
        parts = [place / f"rank{r}.pt" for r in range(size)]
        missing = [part for part in parts if not part.is_file()]
        if missing:
            raise StateError(f"{missing[0]} is missing: all ranks must write to one shared folder")
        marker = {"step": step, "world_size": size, "sha256": {part.name: _digest(part) for part in parts}}
        write_text(place / MARKER, json.dumps(marker, indent=1))
        for old in complete(folder)[:-keep]:
            remove(old)
    barrier()
    return place


def remove(place: Path) -> None:
    """Remove a checkpoint, marker first."""
    (place / MARKER).unlink()
    shutil.rmtree(place)


def complete(folder: Path) -> list[Path]:
    places = [path.parent for path in folder.glob(f"step-*/{MARKER}")]
    return sorted((path for path in places if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def latest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def step_of(place: Path) -> int:
    """Return a checkpoint's step.

    >>> step_of(Path("step-000123"))
    123
    """
    return int(place.name.removeprefix("step-"))


def load(place: Path, *, rank: int, size: int) -> dict[str, Any]:
    """Load this rank's part to the CPU. Runs no code from the file.

    Raises `StateError` if the checkpoint is incomplete, damaged, or of a different world size. It
    never falls back to an older one.
    """
    marker = _marker(place)
    if marker["world_size"] != size:
        raise StateError(
            f"{place} was written by {marker['world_size']} ranks, this run has {size}: "
            "start the same number of workers, or convert the state with laconic.resize"
        )
    part = place / f"rank{rank}.pt"
    if not part.is_file():
        raise StateError(f"{part} is missing, but {place / MARKER} lists it; {_hint(place)}")
    if _digest(part) != marker["sha256"].get(part.name):
        raise StateError(f"{part} is damaged: its SHA-256 differs from the recorded one; {_hint(place)}")
    try:
        state: dict[str, Any] = torch.load(part, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, BadZipFile, RuntimeError, EOFError, OSError) as error:
        raise StateError(f"cannot read {part}: {error}; {_hint(place)}") from error
    return state


def _marker(place: Path) -> dict[str, Any]:
    path = place / MARKER
    if not path.is_file():
        raise StateError(f"{place} is not complete: not every rank has written its part; {_hint(place)}")
    try:
        marker: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(marker["world_size"], int) or not isinstance(marker["sha256"], dict):
            raise TypeError("world_size or sha256 has the wrong type")
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is damaged: {error!r}; {_hint(place)}") from error
    return marker


def _hint(place: Path) -> str:
    older = [path for path in complete(place.parent) if step_of(path) < step_of(place)]
    if older:
        return f"remove {place} to resume from {older[-1].name}"
    return f"remove {place} to start again"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
