"""One rank's state on disk, and its conversion to a new number of ranks.

torch.distributed.checkpoint merges tensors saved under one key, so rank 1 would load rank 0's residual: every
key has the rank, and a state of a different rank, size, model or method is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.errors import StateError
from laconic.core.layout import Layout

FORMAT = 2
HINTS = {
    "spec": "; take that spec, or start with new checkpoints",
    "size": "; laconic.resize makes states for another number of ranks",
    "rank": "; save one file a rank, or state_dict(gather=True) on rank 0, which loads on every rank",
}


class Identity(TypedDict):
    """Owner of a state; all fields must be equal when it is loaded."""

    format: int
    spec: str
    model: str
    rank: int
    size: int
    seed: int


class RankState(Identity):
    """State that `torch.load(weights_only=True)` accepts."""

    step: int
    tensors: dict[str, Tensor]  # "rank<r>/<what>/<tensor name>"


def model_digest(layout: Layout) -> str:
    text = repr(sorted((entry.name, entry.shape) for entry in layout))
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{len(layout)} tensors, {layout.numel} elements, {digest}"


def identity(spec: object, layout: Layout, rank: int, size: int, seed: int) -> Identity:
    return Identity(
        format=FORMAT, spec=repr(spec), model=model_digest(layout), rank=rank, size=size, seed=seed
    )


def label(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {f"rank{rank}/{key}": value for key, value in tensors.items()}


def unlabel(state: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    check_has(state, RankState.__annotations__)
    for key, value in expected.items():
        if state[key] != value:
            hint = HINTS.get(key, "")
            raise StateError(f"the saved state is of {key} {state[key]!r}, this handle has {value!r}{hint}")
    prefix = f"rank{state['rank']}/"
    return {key.removeprefix(prefix): tensor for key, tensor in state["tensors"].items()}


def check_has(state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise `StateError` unless `state` has these keys, and its 'tensors' are a dictionary."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state of a handle must be a dictionary, got {arguments.shown(state)}")
    missing = next((key for key in keys if key not in state), None)
    if missing is not None:
        raise StateError(f"this is not a state of a handle: it has no {missing!r}")
    if not isinstance(tensors := state.get("tensors", {}), Mapping):
        raise StateError(f"this is not a state of a handle: its 'tensors' are {arguments.shown(tensors)}")


def check_shapes(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    own, other = ({key: tuple(value.shape) for key, value in each.items()} for each in (mine, saved))
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            raise StateError(
                f"{key} has shape {other.get(key)} in the saved state, here {own.get(key)}: it is of"
                f" another model or {what}"
            )


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def without(prefixes: Collection[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if not key.startswith(tuple(prefixes))}


def resize(states: Sequence[Mapping[str, Any]] | Mapping[str, Any], size: int) -> list[RankState]:
    """Convert the states of all ranks of a run to a new number of ranks.

    A step applies the mean of the sent shares, so N ranks still owe (1/N) * sum of their residuals: every
    new rank gets that. State that one rank holds for all ("once/..." in its key) is copied to every new
    rank. For a strategy, every new rank gets the average model, by PushSum's weights if it has them, and the
    maximum of integers such as rounds.

    Args:
        states: The `state_dict()` of every old rank, in rank order; or a handle's
            `state_dict(gather=True)`.
        size: The new number of ranks, at least 1.

    Returns:
        One state for each new rank, in rank order.

    Raises:
        StateError: A state is missing or out of order, or the states are of different runs, or of a model
            under `fully_shard`.
    """
    if size < 1:
        raise StateError(f"size must be at least 1, got {size}")
    saved: Sequence[Mapping[str, Any]] = states.get("ranks", []) if isinstance(states, Mapping) else states
    for state in saved:
        if isinstance(state, Mapping) and "parameters" in state:
            raise StateError(
                "resize does not support states of a model under fully_shard: one without unsent gradients"
                " loads on any number of ranks as it is; unsent gradients belong to their rank's shard: start"
                " again from the saved model"
            )
        check_has(state, RankState.__annotations__)
    if not saved or [state.get("rank") for state in saved] != list(range(saved[0]["size"])):
        raise StateError(
            f"resize needs the states of all ranks in rank order, got ranks {[s.get('rank') for s in saved]}"
        )
    first = saved[0]
    parts = []
    for rank, state in enumerate(saved):
        same = {key: first[key] for key in ("format", "spec", "model", "size", "seed", "step")}
        parts.append(unlabel(state, {**same, "rank": rank}))
        if parts[-1].keys() != parts[0].keys():
            raise StateError(
                f"resize needs states with the same tensors, but the state of rank {rank} differs from that"
                " of rank 0, as in by_machine(...): start again from the saved model"
            )
    _weigh(parts)
    carried = {key: _carried(key, [part[key] for part in parts]) for key in parts[0]}
    return [
        RankState(
            format=FORMAT,
            spec=first["spec"],
            model=first["model"],
            rank=rank,
            size=size,
            seed=first["seed"],
            step=first["step"],
            tensors=label({key: value.clone() for key, value in carried.items()}, rank),
        )
        for rank in range(size)
    ]


def _weigh(parts: list[dict[str, Tensor]]) -> None:
    """Scale the models so that their mean is PushSum's average. The weights' sum is N."""
    for part in parts if "flat" in parts[0] else ():
        for key, value in part.items():
            if key.rpartition("/")[2] == "weight" and value.dtype == torch.float64 and not value.dim():
                part["flat"] = part["flat"] * float(value)


ONCE = re.compile(r"(rule\d+/)?route\d+/once/")


def _carried(key: str, values: list[Tensor]) -> Tensor:
    if not values[0].is_floating_point():
        return torch.stack(values).amax(dim=0)
    if not ONCE.match(key):
        return torch.stack(values).mean(dim=0)
    held = torch.zeros_like(values[0])
    for value in values:  # the first nonzero value: the sum, unless the states were resized already
        held = torch.where(held == 0, value, held)
    return held


def merged(key: str, value: Tensor, comm: Comm, holders: int, *, mine: bool) -> Tensor:
    """Compute `resize` for a tensor of `holders` ranks, on all ranks; `mine`: include this rank's."""
    own = value.clone() if mine else torch.zeros_like(value)
    if not value.is_floating_point():
        lowest = torch.iinfo(torch.int64).min
        whole = own.to(torch.int64) if mine else torch.full_like(value, lowest, dtype=torch.int64)
        return comm.all_reduce(whole, "max").to(value.dtype)
    if not ONCE.match(key):
        return comm.all_reduce(own).div_(holders)
    most, least = comm.all_reduce(own.clone(), "max"), comm.all_reduce(own, "min")
    return torch.where(most == 0, least, most)
