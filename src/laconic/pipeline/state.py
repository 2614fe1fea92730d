"""Saved state of a pipeline's buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_json
from laconic.core.errors import StateError
from laconic.pipeline.buffer import NEW, WAY_OUT, Saved
from laconic.pipeline.changes import Changes
from laconic.pipeline.message import digest
from laconic.pipeline.step import Step

FORMAT = 1


def saved(identity: Mapping[str, Any], step: int, buffers: Mapping[str, Saved]) -> dict[str, Any]:
    tensors = {
        f"rank{identity['rank']}/{name}/{part}": tensor
        for part in ("seen", "rows", "version")
        for name, buffer in buffers.items()
        for tensor in [vars(buffer)[part]]
    }
    return {"format": FORMAT, **identity, "step": step, "tensors": tensors}


def loaded(state: Mapping[str, Any], identity: Mapping[str, Any]) -> tuple[int, dict[str, Saved]]:
    """Return a state's step and buffers. Raises `StateError` if damaged or foreign."""
    for key, value in {"format": FORMAT, **identity}.items():
        if key not in state:
            raise StateError(f"this is not a pipeline handle's state: {key!r} is missing")
        if state[key] != value:
            raise StateError(
                f"the saved state has {key} {state[key]!r}, this handle has {value!r}: save and load one"
                " file per rank, with the same call of compress"
            )
    step, tensors = state.get("step"), state.get("tensors")
    if type(step) is not int or step < 0:
        raise _damaged(f"its 'step' is {step!r}")
    if not isinstance(tensors, Mapping):
        raise _damaged("its table of 'tensors' is missing")
    ours = {str(key).partition("/")[2]: tensor for key, tensor in tensors.items()}
    names = dict.fromkeys(key.rpartition("/")[0] for key in ours)
    return step, {name: _buffer(name, ours, identity["samples"]) for name in names}


def _buffer(name: str, tensors: Mapping[str, Any], samples: int) -> Saved:
    new = torch.tensor(list(NEW), dtype=torch.uint8, device="cpu")  # older states have none
    seen = _part(f"{name}/seen", tensors.get(f"{name}/seen"), torch.bool, 1)
    rows = _part(f"{name}/rows", tensors.get(f"{name}/rows"), torch.uint8, 2)
    version = _part(f"{name}/version", tensors.get(f"{name}/version", new), torch.uint8, 1)
    if len(seen) != samples or len(rows) != int(seen.sum()) or len(version) != len(new):
        raise _damaged(
            f"{name} has {len(seen)} flags for {samples} samples, {len(rows)} rows for"
            f" {int(seen.sum())} flagged samples, and a version of {len(version)} bytes"
        )
    return Saved(seen, rows, version)


def _part(key: str, found: Any, dtype: torch.dtype, dims: int) -> Tensor:
    if not isinstance(found, Tensor) or found.dtype != dtype or found.dim() != dims:
        raise _damaged(f"{key} is not a tensor of {dtype} with {dims} dimensions")
    return found


def _damaged(what: str) -> StateError:
    return StateError(f"the saved state is damaged: {what}: load another checkpoint")


def check_fit(buffers: Mapping[str, Saved], channels: Sequence[Changes]) -> None:
    """Raise `StateError` for a buffer of another boundary or row width, if boundaries are known."""
    known = {channel.name: channel for channel in channels}
    for name, buffer in buffers.items():
        if known and name not in known:
            raise StateError(
                f"the saved state has the boundary {name}, which is not among {', '.join(known)}: the model"
                " has changed"
            )
        width, rows = known[name].row_bytes if known else 0, buffer.rows
        if known and len(rows) and rows.shape[1] != width:
            raise StateError(
                f"a saved sample of {name} fills {rows.shape[1]} bytes, here {width}: the model or the length"
                f" of sequences has changed; without that state, {WAY_OUT}"
            )


def agree_on(comm: Comm, step: Step, channels: Sequence[Changes], pipeline: int) -> None:
    """Raise on every rank unless all ranks of a replica (`pipeline`) have the same step, ids and visited
    samples.

    It precedes all messages, as some backends hang on an unexpected length.
    """
    step.end(comm)
    ids = b"" if step.ids is None else step.ids.numpy().tobytes()
    visited = sorted({digest(each.buffer.seen.numpy().tobytes()) for each in channels})
    mine = [pipeline, [step.number, digest(ids), visited]]
    known: dict[int, tuple[int, Any]] = {}
    for rank, (which, said) in enumerate(gather_json(comm, mine)):
        first, other = known.setdefault(which, (rank, said))
        if said != other:
            raise StateError(
                f"ranks {first} and {rank} disagree about the step, sample ids or which samples were seen:"
                f" pass the same ids to all ranks, and load states of one checkpoint on all ranks; {WAY_OUT}"
            )
